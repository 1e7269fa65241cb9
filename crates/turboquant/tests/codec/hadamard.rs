//! Every accepted width has an orthonormal rotation, of a stated construction.

use turboquant::{
    format::{KeyFormat, RowFormat, ValueFormat},
    hadamard::{Construction, Rotation},
    layout::head_dims,
    rows::{Isa, RowCodec},
};

use crate::random;

/// Width, order of the Paley part, elements of its field; worked out by hand from the lists of primes
/// and prime powers.
const PALEY_1: [(usize, usize, usize); 41] = [
    (24, 12, 11),
    (40, 20, 19),
    (48, 12, 11),
    (56, 28, 27),
    (80, 20, 19),
    (88, 44, 43),
    (96, 12, 11),
    (112, 28, 27),
    (120, 60, 59),
    (136, 68, 67),
    (160, 20, 19),
    (168, 84, 83),
    (176, 44, 43),
    (192, 12, 11),
    (216, 108, 107),
    (224, 28, 27),
    (240, 60, 59),
    (264, 132, 131),
    (272, 68, 67),
    (280, 140, 139),
    (312, 312, 311),
    (320, 20, 19),
    (328, 164, 163),
    (336, 84, 83),
    (344, 344, 343),
    (352, 44, 43),
    (360, 180, 179),
    (368, 368, 367),
    (384, 12, 11),
    (424, 212, 211),
    (432, 108, 107),
    (448, 28, 27),
    (456, 228, 227),
    (464, 464, 463),
    (480, 60, 59),
    (488, 244, 243),
    (504, 252, 251),
    (528, 132, 131),
    (544, 68, 67),
    (560, 140, 139),
    (568, 284, 283),
];
const PALEY_2: [(usize, usize, usize); 18] = [
    (72, 36, 17),
    (104, 52, 25),
    (144, 36, 17),
    (152, 76, 37),
    (200, 100, 49),
    (208, 52, 25),
    (248, 124, 61),
    (288, 36, 17),
    (296, 148, 73),
    (304, 76, 37),
    (392, 196, 97),
    (400, 100, 49),
    (408, 204, 101),
    (416, 52, 25),
    (440, 220, 109),
    (496, 124, 61),
    (552, 276, 137),
    (576, 36, 17),
];
const SYLVESTER: [usize; 6] = [16, 32, 64, 128, 256, 512];
const BLOCKS_OF_8: [usize; 6] = [184, 232, 376, 472, 520, 536];

#[test]
fn every_width_is_made_as_documented() {
    for width in SYLVESTER {
        assert_eq!(Construction::of(width), Construction::Sylvester);
    }
    for (kind, table) in [(1, &PALEY_1[..]), (2, &PALEY_2[..])] {
        for &(width, order, field) in table {
            let expected = Construction::Paley { order, field, kind, sylvester: width / order };
            assert_eq!(Construction::of(width), expected, "width {width}");
        }
    }
    for width in BLOCKS_OF_8 {
        assert_eq!(Construction::of(width), Construction::Blocks { order: 8 });
    }
    let listed = SYLVESTER.len() + PALEY_1.len() + PALEY_2.len() + BLOCKS_OF_8.len();
    assert_eq!(listed, head_dims().count());
}

/// Signs of `H[i][j]`.
fn signs(rotation: &Rotation) -> Vec<Vec<i8>> {
    let width = rotation.width();
    (0..width).map(|i| (0..width).map(|j| rotation.sign(i, j)).collect()).collect()
}

#[test]
fn every_matrix_is_orthonormal() {
    for width in head_dims() {
        let rotation = Rotation::shared(width);
        let h = signs(&rotation);
        for (i, a) in h.iter().enumerate() {
            for (j, b) in h.iter().enumerate().skip(i) {
                let product: i32 = a.iter().zip(b).map(|(a, b)| i32::from(*a) * i32::from(*b)).sum();
                let product = f64::from(product) * f64::from(rotation.scale()).powi(2);
                let expected = if i == j { 1.0 } else { 0.0 };
                assert!((product - expected).abs() < 1e-6, "width {width}, rows {i} and {j}: {product}");
            }
        }
        let entries = h.iter().flatten().filter(|x| **x != 0).count();
        let per_row = if BLOCKS_OF_8.contains(&width) { 8 } else { width };
        assert_eq!(entries, width * per_row, "width {width} is no full Hadamard matrix");
    }
}

#[test]
fn powers_of_two_follow_sylvesters_recursion() {
    let mut expected = vec![vec![1i8]];
    while expected.len() < 512 {
        let twice =
            |row: &Vec<i8>, sign: i8| row.iter().copied().chain(row.iter().map(|x| x * sign)).collect();
        expected = expected
            .iter()
            .map(|row| twice(row, 1))
            .chain(expected.iter().map(|row| twice(row, -1)))
            .collect();
        let rotation = (expected.len() >= 16).then(|| Rotation::shared(expected.len()));
        for (i, row) in expected.iter().enumerate() {
            for (j, sign) in row.iter().enumerate() {
                assert!(rotation.as_ref().is_none_or(|r| r.sign(i, j) == *sign));
            }
        }
    }
}

/// The quadratic residues modulo 11 are 1, 3, 4, 5 and 9.
#[test]
fn order_12_is_paleys_matrix_over_11_elements() {
    let rotation = Rotation::shared(24);
    let (order, entries) = rotation.paley().unwrap();
    assert_eq!(order, 12);
    for i in 0..12 {
        for j in 0..12 {
            let expected = match (i, j) {
                (0, _) => 1.0,
                (_, 0) => -1.0,
                _ if i == j => 1.0,
                _ if [1, 3, 4, 5, 9].contains(&((i + 11 - j) % 11)) => 1.0,
                _ => -1.0,
            };
            assert_eq!(entries[i * 12 + j], expected, "({i}, {j})");
        }
    }
}

fn rotated_codec(head_dim: usize) -> RowCodec {
    let format = RowFormat { key: KeyFormat::LloydMax { bits: 4 }, value: ValueFormat::Uniform { bits: 4 } };
    RowCodec::new(format, head_dim, head_dim).unwrap()
}

#[test]
fn the_fast_transform_is_the_matrix_product() {
    for isa in Isa::available() {
        for width in head_dims() {
            let rotation = Rotation::shared(width);
            let h = signs(&rotation);
            let x = &random::rows(31, 1, width)[0];
            let mut y = x.clone();
            rotated_codec(width).rotate_query(isa, &mut y);
            for (j, y) in y.iter().enumerate() {
                let expected: f64 = x.iter().zip(&h).map(|(x, row)| f64::from(*x) * f64::from(row[j])).sum();
                let error = (f64::from(*y) - expected * f64::from(rotation.scale())).abs();
                assert!(error < 1e-5, "width {width}, element {j}, {}: {error}", isa.name());
            }
        }
    }
}

#[test]
fn unrotated_formats_leave_queries_alone() {
    let format = RowFormat { key: KeyFormat::Fp8, value: ValueFormat::Uniform { bits: 4 } };
    let codec = RowCodec::new(format, 80, 80).unwrap();
    let mut query = random::rows(32, 1, 80).remove(0);
    let before = query.clone();
    codec.rotate_query(Isa::detect(), &mut query);
    assert_eq!(query, before);
}
