//! Rows: one head's key and value at one token, encoded and decoded.
//!
//! [`RowCodec`] is made once per layer shape. [`RowCodec::encode_slot`] and the `decode_*` functions
//! speak vLLM's slot layout; a cache with an order of its own takes codes and fp16 fields apart
//! ([`RowCodec::encode_key`], [`RowCodec::encode_value`]) and packs them with [`pack_codes`].
//!
//! # Rules for unusual rows
//!
//! Finite input never decodes to NaN or infinity, and every departure is counted in
//! [`EncodeReport`].
//!
//! | format | row | stored | decodes to |
//! |---|---|---|---|
//! | LloydMax key | all zero, or norm below 2^-25 | middle codes, norm 0 | zeros |
//! | | norm of 65520 or more | codes of the direction, norm 65504 | same direction, norm 65504 |
//! | | any NaN or infinity in it | codes 0, norm NaN (0x7E00) | NaN in every place |
//! | Uniform value | constant | codes 0, scale 0, fp16 minimum | the fp16-rounded constant |
//! | | minimum or scale of 65520 or more | that field +-65504, codes against it | the nearest value in reach |
//! | | any NaN or infinity in it | codes 0, scale and minimum NaN | NaN in every place |
//! | e4m3 | beyond +-448, infinities included | +-448 | +-448 |
//! | | NaN | 0x7F | NaN in that place |
//! | native | finite, too large for f16 or bf16 | the largest finite value | that |
//! | | NaN or infinity | as it is | as it is |
//!
//! A non-finite row stays visible (whoever attends to it gets NaN) and stays in its own token's
//! bytes.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
mod element;
mod isa;
mod report;
mod scalar;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use half::f16;

pub use element::Element;
pub use isa::{Avx2, Isa};
pub use report::EncodeReport;

use crate::{
    codebook::Codebook,
    error::CodecError,
    format::{KeyFormat, NativeDtype, RowFormat, ValueFormat},
    hadamard::Rotation,
    layout::{MAX_HEAD_DIM, RowLayout},
};

/// Added to a key's norm before it divides, as in vLLM.
const KEY_NORM_EPSILON: f32 = 1e-8;
/// Added to the sum of squared centroids before its root is taken, as in vLLM.
const CENTROID_NORM_EPSILON: f32 = 1e-16;
/// Smallest scale that values are quantised with, as in vLLM; as fp16 it is 0.
const MIN_VALUE_SCALE: f32 = 1e-8;
/// 2^-80: what a key is multiplied by when its squares overflow f32.
const HUGE_KEY_SCALE: f32 = f32::from_bits((127 - 80) << 23);

/// What a key row holds beside its codes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KeyMeta {
    /// Norm of the key as given; 1 for formats that store none.
    pub norm: f16,
}

/// What a value row holds beside its codes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ValueMeta {
    /// Step of the grid; 1 for formats that store none.
    pub scale: f16,
    /// Smallest element, the value of code 0; 0 for formats that store none.
    pub zero: f16,
}

/// Encoder and decoder of the rows of one format and shape. A clone shares the tables.
#[derive(Debug, Clone)]
pub struct RowCodec {
    format: RowFormat,
    layout: Arc<RowLayout>,
    key: KeyCoder,
}

/// The key's format with the tables it needs.
#[derive(Debug, Clone)]
enum KeyCoder {
    Native(NativeDtype),
    Fp8,
    LloydMax { bits: u8, codebook: Arc<Codebook>, rotation: Arc<Rotation> },
}

impl RowCodec {
    /// The codec for rows of `format` with the given widths.
    ///
    /// # Errors
    /// Widths that are no multiple of 8 from 16 to 576, and codes of other than 3 or 4 bits.
    ///
    /// ```
    /// use turboquant::{format::*, rows::{EncodeReport, Isa, RowCodec}};
    /// let format = CacheDtype::TurboQuant(Preset::FourBitNc).row_format(NativeDtype::Bf16);
    /// let codec = RowCodec::new(format, 64, 64)?;
    /// let (key, value) = (vec![0.5f32; 64], vec![0.25f32; 64]);
    /// let mut slot = vec![0; codec.layout().slot_bytes];
    /// let mut report = EncodeReport::default();
    /// codec.encode_slot(Isa::detect(), &key, &value, &mut slot, &mut report);
    /// let mut decoded = vec![0.0; 64];
    /// codec.decode_value(Isa::detect(), &slot, &mut decoded);
    /// assert_eq!(decoded, value);
    /// assert!(report.is_clean());
    /// # Ok::<(), turboquant::error::CodecError>(())
    /// ```
    pub fn new(format: RowFormat, key_head_dim: usize, value_head_dim: usize) -> Result<Self, CodecError> {
        let layout = Arc::new(RowLayout::new(format, key_head_dim, value_head_dim)?);
        let key = match format.key {
            KeyFormat::Native(dtype) => KeyCoder::Native(dtype),
            KeyFormat::Fp8 => KeyCoder::Fp8,
            KeyFormat::LloydMax { bits } => KeyCoder::LloydMax {
                bits,
                codebook: Codebook::shared(key_head_dim, bits),
                rotation: Rotation::shared(key_head_dim),
            },
        };
        Ok(RowCodec { format, layout, key })
    }

    /// What the rows are made of.
    pub fn format(&self) -> RowFormat {
        self.format
    }

    /// Where the fields of a slot lie.
    pub fn layout(&self) -> &RowLayout {
        &self.layout
    }

    /// Elements of a key.
    pub fn key_head_dim(&self) -> usize {
        self.layout.key_head_dim
    }

    /// Elements of a value.
    pub fn value_head_dim(&self) -> usize {
        self.layout.value_head_dim
    }

    /// The key codebook; None for fp8 and native keys.
    pub fn codebook(&self) -> Option<&Codebook> {
        match &self.key {
            KeyCoder::LloydMax { codebook, .. } => Some(codebook),
            KeyCoder::Native(_) | KeyCoder::Fp8 => None,
        }
    }

    /// The key rotation; None for fp8 and native keys.
    pub fn rotation(&self) -> Option<&Rotation> {
        match &self.key {
            KeyCoder::LloydMax { rotation, .. } => Some(rotation),
            KeyCoder::Native(_) | KeyCoder::Fp8 => None,
        }
    }

    /// Length of what [`RowCodec::encode_key`] writes: one byte per code or e4m3 element, the
    /// element's bytes for native keys.
    pub fn key_codes_len(&self) -> usize {
        match self.format.key {
            KeyFormat::Native(dtype) => self.key_head_dim() * dtype.bytes(),
            KeyFormat::Fp8 | KeyFormat::LloydMax { .. } => self.key_head_dim(),
        }
    }

    /// Length of what [`RowCodec::encode_value`] writes, as [`RowCodec::key_codes_len`].
    pub fn value_codes_len(&self) -> usize {
        match self.format.value {
            ValueFormat::Native(dtype) => self.value_head_dim() * dtype.bytes(),
            ValueFormat::Fp8 | ValueFormat::Uniform { .. } => self.value_head_dim(),
        }
    }

    /// Takes a query `[key_head_dim]` into the basis of the stored keys, in place: `q @ H` for
    /// LloydMax keys, nothing for the others.
    ///
    /// # Panics
    /// If the query's length is not `key_head_dim`.
    ///
    /// ```
    /// use turboquant::{format::*, rows::{Isa, RowCodec}};
    /// let format = CacheDtype::TurboQuant(Preset::ThreeBitNc).row_format(NativeDtype::F16);
    /// let codec = RowCodec::new(format, 16, 16)?;
    /// let mut query = [0.0; 16];
    /// query[0] = 4.0;
    /// codec.rotate_query(Isa::detect(), &mut query);
    /// assert_eq!(query, [1.0; 16]);
    /// # Ok::<(), turboquant::error::CodecError>(())
    /// ```
    pub fn rotate_query(&self, isa: Isa, query: &mut [f32]) {
        assert_eq!(query.len(), self.key_head_dim(), "elements of a query");
        if let KeyCoder::LloydMax { rotation, .. } = &self.key {
            isa.rotate(rotation, query);
        }
    }

    /// The key's codes, one per byte (elements' bytes for fp8 and native keys), and its fp16 field.
    ///
    /// # Panics
    /// If `key` is not `[key_head_dim]` or `codes` not `[key_codes_len]`.
    ///
    /// ```
    /// use turboquant::{format::*, rows::{EncodeReport, Isa, RowCodec}};
    /// let format = CacheDtype::TurboQuant(Preset::FourBitNc).row_format(NativeDtype::Bf16);
    /// let codec = RowCodec::new(format, 64, 64)?;
    /// let (mut codes, mut key) = ([0; 64], [0.0; 64]);
    /// let meta = codec.encode_key(Isa::detect(), &[0.5f32; 64], &mut codes, &mut EncodeReport::default());
    /// assert_eq!(meta.norm.to_f32(), 4.0);
    /// codec.key_from_codes(Isa::detect(), &codes, meta, &mut key);
    /// // All of the direction is in the first rotated element.
    /// assert!(key[0] > 3.5);
    /// # Ok::<(), turboquant::error::CodecError>(())
    /// ```
    pub fn encode_key<T: Element>(
        &self,
        isa: Isa,
        key: &[T],
        codes: &mut [u8],
        report: &mut EncodeReport,
    ) -> KeyMeta {
        assert_eq!(key.len(), self.key_head_dim(), "elements of a key");
        assert_eq!(codes.len(), self.key_codes_len(), "bytes of key codes");
        let mut x = [0.0; MAX_HEAD_DIM];
        let x = &mut x[..key.len()];
        let non_finite = T::widen_slice(isa, key, x);
        report.non_finite += non_finite;
        let mut norm = f16::ONE;
        match &self.key {
            KeyCoder::LloydMax { .. } if non_finite > 0 => {
                codes.fill(0);
                norm = f16::NAN;
            }
            KeyCoder::LloydMax { codebook, rotation, .. } => {
                let exact = isa.lloyd_max_codes(rotation, codebook, x, codes);
                norm = saturate_f16(exact, report);
                report.underflowed += u64::from(exact > 0.0 && norm == f16::ZERO);
            }
            KeyCoder::Fp8 => report.fp8_clipped += isa.fp8_bytes(x, codes),
            KeyCoder::Native(dtype) => write_native(isa, *dtype, x, codes, report),
        }
        KeyMeta { norm }
    }

    /// The value's codes, one per byte (elements' bytes for fp8 and native values), and its fp16
    /// fields.
    ///
    /// # Panics
    /// If `value` is not `[value_head_dim]` or `codes` not `[value_codes_len]`.
    pub fn encode_value<T: Element>(
        &self,
        isa: Isa,
        value: &[T],
        codes: &mut [u8],
        report: &mut EncodeReport,
    ) -> ValueMeta {
        assert_eq!(value.len(), self.value_head_dim(), "elements of a value");
        assert_eq!(codes.len(), self.value_codes_len(), "bytes of value codes");
        let mut x = [0.0; MAX_HEAD_DIM];
        let x = &mut x[..value.len()];
        let non_finite = T::widen_slice(isa, value, x);
        report.non_finite += non_finite;
        match self.format.value {
            ValueFormat::Uniform { .. } if non_finite > 0 => {
                codes.fill(0);
                return ValueMeta { scale: f16::NAN, zero: f16::NAN };
            }
            ValueFormat::Uniform { bits } => return uniform_encode(isa, bits, x, codes, report),
            ValueFormat::Fp8 => report.fp8_clipped += isa.fp8_bytes(x, codes),
            ValueFormat::Native(dtype) => write_native(isa, dtype, x, codes, report),
        }
        ValueMeta { scale: f16::ONE, zero: f16::ZERO }
    }

    /// The factor that turns centroids into the key's elements: `norm / |centroids of the codes|`
    /// for LloydMax keys (vLLM's norm correction), 1 for the others.
    ///
    /// # Panics
    /// If `codes` is not `[key_codes_len]`.
    pub fn key_factor(&self, isa: Isa, codes: &[u8], meta: KeyMeta) -> f32 {
        assert_eq!(codes.len(), self.key_codes_len(), "bytes of key codes");
        match self.codebook() {
            None => 1.0,
            Some(codebook) => {
                let squares = isa.centroid_squares(codebook, codes);
                meta.norm.to_f32() / (squares + CENTROID_NORM_EPSILON).sqrt()
            }
        }
    }

    /// The key `[key_head_dim]` of codes as [`RowCodec::encode_key`] writes them, in the stored
    /// basis: rotated for LloydMax keys.
    ///
    /// # Panics
    /// If a length is wrong.
    pub fn key_from_codes(&self, isa: Isa, codes: &[u8], meta: KeyMeta, out: &mut [f32]) {
        assert_eq!(codes.len(), self.key_codes_len(), "bytes of key codes");
        assert_eq!(out.len(), self.key_head_dim(), "elements of a key");
        match &self.key {
            KeyCoder::LloydMax { codebook, .. } => {
                let factor = self.key_factor(isa, codes, meta);
                isa.centroid_values(codebook, codes, factor, out);
            }
            KeyCoder::Fp8 => isa.fp8_values(codes, out),
            KeyCoder::Native(dtype) => read_native(isa, *dtype, codes, out),
        }
    }

    /// The value `[value_head_dim]` of codes as [`RowCodec::encode_value`] writes them.
    ///
    /// # Panics
    /// If a length is wrong.
    pub fn value_from_codes(&self, isa: Isa, codes: &[u8], meta: ValueMeta, out: &mut [f32]) {
        assert_eq!(codes.len(), self.value_codes_len(), "bytes of value codes");
        assert_eq!(out.len(), self.value_head_dim(), "elements of a value");
        match self.format.value {
            ValueFormat::Uniform { .. } => {
                isa.uniform_values(codes, meta.scale.to_f32(), meta.zero.to_f32(), out);
            }
            ValueFormat::Fp8 => isa.fp8_values(codes, out),
            ValueFormat::Native(dtype) => read_native(isa, dtype, codes, out),
        }
    }

    /// Encodes a key and a value into a slot of vLLM's layout. A pad byte becomes 0.
    ///
    /// # Panics
    /// If `key` is not `[key_head_dim]`, `value` not `[value_head_dim]` or `slot` not `[slot_bytes]`.
    pub fn encode_slot<K: Element, V: Element>(
        &self,
        isa: Isa,
        key: &[K],
        value: &[V],
        slot: &mut [u8],
        report: &mut EncodeReport,
    ) {
        let layout = self.layout();
        assert_eq!(slot.len(), layout.slot_bytes, "bytes of a slot");
        let mut codes = [0; MAX_HEAD_DIM];
        match self.key {
            KeyCoder::LloydMax { bits, .. } => {
                let codes = &mut codes[..self.key_head_dim()];
                let meta = self.encode_key(isa, key, codes, report);
                pack_codes(isa, bits, codes, &mut slot[layout.key_codes.clone()]);
                write_f16(slot, layout.norm, meta.norm);
            }
            KeyCoder::Fp8 | KeyCoder::Native(_) => {
                self.encode_key(isa, key, &mut slot[layout.key_codes.clone()], report);
            }
        }
        match self.format.value {
            ValueFormat::Uniform { bits } => {
                let codes = &mut codes[..self.value_head_dim()];
                let meta = self.encode_value(isa, value, codes, report);
                pack_codes(isa, bits, codes, &mut slot[layout.value_codes.clone()]);
                write_f16(slot, layout.scale, meta.scale);
                write_f16(slot, layout.zero, meta.zero);
            }
            ValueFormat::Fp8 | ValueFormat::Native(_) => {
                self.encode_value(isa, value, &mut slot[layout.value_codes.clone()], report);
            }
        }
        slot[layout.key_row_bytes + layout.value_row_bytes..].fill(0);
    }

    /// The key `[key_head_dim]` of a slot, in the stored basis: rotated for LloydMax keys, to be met
    /// by a query from [`RowCodec::rotate_query`].
    ///
    /// # Panics
    /// If `slot` is not `[slot_bytes]` or `out` not `[key_head_dim]`.
    pub fn decode_key(&self, isa: Isa, slot: &[u8], out: &mut [f32]) {
        let layout = self.layout();
        assert_eq!(slot.len(), layout.slot_bytes, "bytes of a slot");
        let packed = &slot[layout.key_codes.clone()];
        let meta = KeyMeta { norm: read_f16(slot, layout.norm, f16::ONE) };
        match self.key {
            KeyCoder::LloydMax { bits, .. } => {
                let mut codes = [0; MAX_HEAD_DIM];
                let codes = &mut codes[..self.key_head_dim()];
                unpack_codes(isa, bits, packed, codes);
                self.key_from_codes(isa, codes, meta, out);
            }
            KeyCoder::Fp8 | KeyCoder::Native(_) => self.key_from_codes(isa, packed, meta, out),
        }
    }

    /// The key `[key_head_dim]` of a slot in the basis it was given in: [`RowCodec::decode_key`],
    /// rotated back.
    ///
    /// # Panics
    /// As [`RowCodec::decode_key`].
    pub fn decode_key_raw_basis(&self, isa: Isa, slot: &[u8], out: &mut [f32]) {
        self.decode_key(isa, slot, out);
        if let KeyCoder::LloydMax { rotation, .. } = &self.key {
            scalar::rotate_back(rotation, out);
        }
    }

    /// The value `[value_head_dim]` of a slot.
    ///
    /// # Panics
    /// If `slot` is not `[slot_bytes]` or `out` not `[value_head_dim]`.
    pub fn decode_value(&self, isa: Isa, slot: &[u8], out: &mut [f32]) {
        let layout = self.layout();
        assert_eq!(slot.len(), layout.slot_bytes, "bytes of a slot");
        let packed = &slot[layout.value_codes.clone()];
        let meta = ValueMeta {
            scale: read_f16(slot, layout.scale, f16::ONE),
            zero: read_f16(slot, layout.zero, f16::ZERO),
        };
        match self.format.value {
            ValueFormat::Uniform { bits } => {
                let mut codes = [0; MAX_HEAD_DIM];
                let codes = &mut codes[..self.value_head_dim()];
                unpack_codes(isa, bits, packed, codes);
                self.value_from_codes(isa, codes, meta, out);
            }
            ValueFormat::Fp8 | ValueFormat::Native(_) => self.value_from_codes(isa, packed, meta, out),
        }
    }
}

/// Packs codes, one per byte, into `bits` (3 or 4) each. Codes are `[n]`, n a multiple of 8 and each
/// below `2^bits`; packed is `[n * bits / 8]`.
///
/// # Panics
/// If the lengths do not match or `bits` is neither 3 nor 4.
///
/// ```
/// use turboquant::rows::{Isa, pack_codes};
/// let mut packed = [0; 4];
/// pack_codes(Isa::detect(), 4, &[1, 2, 3, 4, 5, 6, 7, 8], &mut packed);
/// assert_eq!(packed, [0x21, 0x43, 0x65, 0x87]);
/// ```
pub fn pack_codes(isa: Isa, bits: u8, codes: &[u8], packed: &mut [u8]) {
    check_packed(bits, codes.len(), packed.len());
    if bits == 3 { isa.pack3(codes, packed) } else { isa.pack4(codes, packed) }
}

/// The inverse of [`pack_codes`].
///
/// # Panics
/// As [`pack_codes`].
///
/// ```
/// use turboquant::rows::{Isa, unpack_codes};
/// let mut codes = [0; 8];
/// unpack_codes(Isa::detect(), 4, &[0x21, 0x43, 0x65, 0x87], &mut codes);
/// assert_eq!(codes, [1, 2, 3, 4, 5, 6, 7, 8]);
/// ```
pub fn unpack_codes(isa: Isa, bits: u8, packed: &[u8], codes: &mut [u8]) {
    check_packed(bits, codes.len(), packed.len());
    if bits == 3 { isa.unpack3(packed, codes) } else { isa.unpack4(packed, codes) }
}

fn check_packed(bits: u8, codes: usize, packed: usize) {
    assert!(matches!(bits, 3 | 4), "codes of {bits} bits");
    assert!(
        codes.is_multiple_of(8) && packed == codes / 8 * usize::from(bits),
        "{codes} codes of {bits} bits in {packed} bytes"
    );
}

fn uniform_encode(isa: Isa, bits: u8, x: &[f32], codes: &mut [u8], report: &mut EncodeReport) -> ValueMeta {
    let levels = f32::from((1u8 << bits) - 1);
    let (low, high) = isa.min_max(x);
    // + 0.0 turns -0 into +0: which zero a minimum picks depends on the order of comparisons.
    let (zero, zero16) = saturate_pair(low + 0.0, report);
    let range = high - zero;
    let (scale, scale16) = saturate_pair((range / levels).max(MIN_VALUE_SCALE), report);
    report.underflowed += u64::from(range > 0.0 && scale16 == f16::ZERO);
    isa.uniform_codes(x, scale, zero, levels, codes);
    ValueMeta { scale: scale16, zero: zero16 }
}

/// The fp16 field of `x`, and the value to quantise against: `x` itself, or the limit it hit.
fn saturate_pair(x: f32, report: &mut EncodeReport) -> (f32, f16) {
    let stored = saturate_f16(x, report);
    if f16::from_f32(x).is_infinite() { (stored.to_f32(), stored) } else { (x, stored) }
}

/// fp16 of `x`, with +-65504 for what would round to infinity.
fn saturate_f16(x: f32, report: &mut EncodeReport) -> f16 {
    let stored = f16::from_f32(x);
    if stored.is_infinite() {
        report.saturated += 1;
        return f16::MAX.copysign(stored);
    }
    stored
}

fn write_native(isa: Isa, dtype: NativeDtype, x: &[f32], bytes: &mut [u8], report: &mut EncodeReport) {
    report.saturated += match dtype {
        NativeDtype::F16 => isa.f16_bytes(x, bytes),
        NativeDtype::Bf16 => isa.bf16_bytes(x, bytes),
        NativeDtype::F32 => {
            for (to, x) in bytes.as_chunks_mut().0.iter_mut().zip(x) {
                *to = x.to_le_bytes();
            }
            0
        }
    }
}

fn read_native(isa: Isa, dtype: NativeDtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        NativeDtype::F16 => isa.f16_values(bytes, out),
        NativeDtype::Bf16 => isa.bf16_values(bytes, out),
        NativeDtype::F32 => {
            for (x, from) in out.iter_mut().zip(bytes.as_chunks().0) {
                *x = f32::from_le_bytes(*from);
            }
        }
    }
}

fn write_f16(slot: &mut [u8], at: Option<usize>, x: f16) {
    if let Some(at) = at {
        slot[at..at + 2].copy_from_slice(&x.to_le_bytes());
    }
}

fn read_f16(slot: &[u8], at: Option<usize>, absent: f16) -> f16 {
    at.map_or(absent, |at| f16::from_le_bytes([slot[at], slot[at + 1]]))
}
