//! What packed bytes hide: the f32 numbers that codes and fp16 fields are rounded from.

use proptest::prelude::*;

use super::Isa;
use crate::{codebook::Codebook, hadamard::Rotation, layout::head_dims};

fn rows() -> impl Strategy<Value = Vec<f32>> {
    let widths = prop::sample::select(head_dims().collect::<Vec<_>>());
    widths.prop_flat_map(|width| prop::collection::vec(-1f32..1.0, width))
}

/// Norm, the bits of the rotated unit key, codes, sum of squared centroids.
fn intermediate(isa: Isa, key: &[f32], bits: u8) -> (u32, Vec<u32>, Vec<u8>, u32) {
    let (rotation, codebook) = (Rotation::shared(key.len()), Codebook::shared(key.len(), bits));
    let (mut x, mut codes) = (key.to_vec(), vec![0; key.len()]);
    let norm = isa.lloyd_max_codes(&rotation, &codebook, &mut x, &mut codes);
    let squares = isa.centroid_squares(&codebook, &codes);
    (norm.to_bits(), x.iter().map(|x| x.to_bits()).collect(), codes, squares.to_bits())
}

proptest! {
    #[test]
    fn sums_have_one_order_on_every_isa(key in rows(), bits in 3u8..=4) {
        let expected = intermediate(Isa::Scalar, &key, bits);
        for isa in Isa::available() {
            prop_assert_eq!(&intermediate(isa, &key, bits), &expected);
        }
    }
}
