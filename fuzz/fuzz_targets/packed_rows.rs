//! Any bytes as a packed row: it decodes, on every instruction set to the same numbers.
#![no_main]

use libfuzzer_sys::fuzz_target;
use turboquant::{
    format::{CacheDtype, NativeDtype},
    rows::{Isa, RowCodec},
};

fuzz_target!(|bytes: &[u8]| {
    let [width, dtype, row @ ..] = bytes else { return };
    let head_dim = 16 + 8 * (usize::from(*width) % 71);
    let dtype = CacheDtype::ALL[usize::from(*dtype) % CacheDtype::ALL.len()];
    let Ok(codec) = RowCodec::new(dtype.row_format(NativeDtype::Bf16), head_dim, head_dim) else {
        panic!("head_dim {head_dim} is refused")
    };
    let mut slot = vec![0; codec.layout().slot_bytes];
    slot.iter_mut().zip(row).for_each(|(to, from)| *to = *from);
    let decode = |isa| {
        let (mut key, mut value) = (vec![0f32; head_dim], vec![0f32; head_dim]);
        codec.decode_key(isa, &slot, &mut key);
        codec.decode_value(isa, &slot, &mut value);
        key.into_iter().chain(value).map(f32::to_bits).collect::<Vec<_>>()
    };
    let scalar = decode(Isa::Scalar);
    for isa in Isa::available() {
        let nan = |bits: &u32| f32::from_bits(*bits).is_nan();
        assert!(decode(isa).iter().zip(&scalar).all(|(a, b)| a == b || nan(a) && nan(b)));
    }
});
