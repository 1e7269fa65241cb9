//! e4m3 (the "fn" variant: no infinity, one NaN per sign), as software.
//!
//! Rounding is to nearest, ties to even, saturating: every finite or infinite input beyond +-448
//! becomes +-448, every NaN becomes 0x7F. These are the bytes that NVIDIA's saturating conversion
//! gives, so a CPU and a GPU write the same cache.

/// The largest finite e4m3 value.
pub const E4M3_MAX: f32 = 448.0;
/// The NaN that the encoder writes; 0xFF is the other one.
pub const E4M3_NAN: u8 = 0x7F;

/// The nearest e4m3 byte.
///
/// ```
/// use turboquant::fp8;
/// assert_eq!(fp8::decode(fp8::encode(17.0)), 16.0);
/// assert_eq!(fp8::encode(1e9), 0x7E);
/// ```
pub fn encode(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let magnitude = x.abs();
    if magnitude.is_nan() {
        return E4M3_NAN;
    }
    // Below 2^-6 e4m3 is subnormal with a step of 2^-9. Adding 2^14 puts the f32 step (2^-9 there)
    // exactly on that grid, so the sum's last bits are the rounded code.
    if magnitude < 0.015625 {
        return sign | ((magnitude + 16384.0).to_bits() - 16384f32.to_bits()) as u8;
    }
    // Keep 3 of 23 mantissa bits: add just under half a step, plus one when the kept last bit is odd.
    let bits = magnitude.min(E4M3_MAX).to_bits();
    let rounded = bits + 0x7_FFFF + ((bits >> 20) & 1);
    // Exponent bias 127 -> 7.
    sign | ((rounded >> 20) - (120 << 3)) as u8
}

/// The value of an e4m3 byte; NaN for 0x7F and 0xFF.
pub fn decode(byte: u8) -> f32 {
    TABLE[usize::from(byte)]
}

/// The value of every byte.
pub static TABLE: [f32; 256] = table();

const fn table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (sign, exponent, mantissa) = (byte as u32 >> 7, byte as u32 >> 3 & 0xF, byte as u32 & 7);
        let magnitude = if exponent == 15 && mantissa == 7 {
            f32::NAN
        } else if exponent == 0 {
            mantissa as f32 / 512.0
        } else {
            f32::from_bits((exponent + 120) << 23 | mantissa << 20)
        };
        table[byte] = if sign == 1 { -magnitude } else { magnitude };
        byte += 1;
    }
    table
}
