//! Prints how fast slots are encoded on one core: GB/s of bf16 keys and values read, per format,
//! head_dim and instruction set.
//!
//! `cargo run --release -p turboquant --example encode_speed`

#![expect(clippy::print_stdout, reason = "its purpose")]

use std::time::{Duration, Instant};

use half::bf16;
use turboquant::{
    error::CodecError,
    format::{CacheDtype, NativeDtype},
    rows::{EncodeReport, Isa, RowCodec},
};

const HEAD_DIMS: [usize; 8] = [64, 80, 96, 128, 192, 256, 512, 576];
/// Rows of one pass: a few MB, so that input and output stay in the L2 or L3 cache.
const ROWS: usize = 2048;

fn main() -> Result<(), CodecError> {
    for isa in Isa::available() {
        println!("\nencode, {}: GB/s of bf16 input on one core", isa.name());
        print!("{:<20}", "head_dim");
        HEAD_DIMS.iter().for_each(|head_dim| print!("{head_dim:>7}"));
        println!();
        for dtype in CacheDtype::ALL {
            print!("{:<20}", dtype.name());
            for head_dim in HEAD_DIMS {
                print!("{:>7.2}", gigabytes_per_second(dtype, head_dim, isa)?);
            }
            println!();
        }
    }
    Ok(())
}

fn gigabytes_per_second(dtype: CacheDtype, head_dim: usize, isa: Isa) -> Result<f64, CodecError> {
    let codec = RowCodec::new(dtype.row_format(NativeDtype::Bf16), head_dim, head_dim)?;
    // Any bell-shaped numbers will do.
    let mut state = 1u32;
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(state >> 8) / f64::from(1 << 24)
    };
    let mut normal = || bf16::from_f64((0..12).map(|_| uniform()).sum::<f64>() - 6.0);
    let keys: Vec<bf16> = (0..ROWS * head_dim).map(|_| normal()).collect();
    let values: Vec<bf16> = (0..ROWS * head_dim).map(|_| normal()).collect();
    let mut slots = vec![0; ROWS * codec.layout().slot_bytes];
    let mut report = EncodeReport::default();
    let mut pass = || {
        let start = Instant::now();
        let rows = keys.chunks_exact(head_dim).zip(values.chunks_exact(head_dim));
        for ((key, value), slot) in rows.zip(slots.chunks_exact_mut(codec.layout().slot_bytes)) {
            codec.encode_slot(isa, key, value, slot, &mut report);
        }
        start.elapsed()
    };
    // The best of several passes: other work on the machine only ever adds time.
    let best = (0..12).map(|_| pass()).min().unwrap_or(Duration::MAX);
    Ok((2 * 2 * ROWS * head_dim) as f64 / best.as_secs_f64() / 1e9)
}
