//! What a cache row can be made of: the presets, `fp8`, and the model's own dtype.

use std::{fmt, str::FromStr};

/// The four TurboQuant presets, with vLLM's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Preset {
    /// e4m3 keys, 4-bit values.
    K8V4,
    /// 4-bit Lloyd-Max keys, 4-bit values.
    FourBitNc,
    /// 3-bit Lloyd-Max keys, 4-bit values.
    K3V4Nc,
    /// 3-bit Lloyd-Max keys, 3-bit values.
    ThreeBitNc,
}

impl Preset {
    /// All presets, from the largest rows to the smallest.
    pub const ALL: [Preset; 4] = [Preset::K8V4, Preset::FourBitNc, Preset::K3V4Nc, Preset::ThreeBitNc];
}

/// Element type of an unpacked (`auto`) row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NativeDtype {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    F16,
    /// 2 bytes.
    Bf16,
}

impl NativeDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            NativeDtype::F32 => 4,
            NativeDtype::F16 | NativeDtype::Bf16 => 2,
        }
    }
}

/// A value of `--kv-cache-dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheDtype {
    /// The model's own dtype.
    Auto,
    /// e4m3 keys and values, scale 1.0.
    Fp8,
    /// A TurboQuant preset.
    TurboQuant(Preset),
}

impl CacheDtype {
    /// Every dtype a user can ask for, in the order the tables print them.
    pub const ALL: [CacheDtype; 6] = [
        CacheDtype::Auto,
        CacheDtype::Fp8,
        CacheDtype::TurboQuant(Preset::K8V4),
        CacheDtype::TurboQuant(Preset::FourBitNc),
        CacheDtype::TurboQuant(Preset::K3V4Nc),
        CacheDtype::TurboQuant(Preset::ThreeBitNc),
    ];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            CacheDtype::Auto => "auto",
            CacheDtype::Fp8 => "fp8",
            CacheDtype::TurboQuant(Preset::K8V4) => "turboquant_k8v4",
            CacheDtype::TurboQuant(Preset::FourBitNc) => "turboquant_4bit_nc",
            CacheDtype::TurboQuant(Preset::K3V4Nc) => "turboquant_k3v4_nc",
            CacheDtype::TurboQuant(Preset::ThreeBitNc) => "turboquant_3bit_nc",
        }
    }

    /// The rows this dtype means in a model of dtype `native`.
    pub const fn row_format(self, native: NativeDtype) -> RowFormat {
        let (key, value) = match self {
            CacheDtype::Auto => (KeyFormat::Native(native), ValueFormat::Native(native)),
            CacheDtype::Fp8 => (KeyFormat::Fp8, ValueFormat::Fp8),
            CacheDtype::TurboQuant(Preset::K8V4) => (KeyFormat::Fp8, ValueFormat::Uniform { bits: 4 }),
            CacheDtype::TurboQuant(Preset::FourBitNc) => {
                (KeyFormat::LloydMax { bits: 4 }, ValueFormat::Uniform { bits: 4 })
            }
            CacheDtype::TurboQuant(Preset::K3V4Nc) => {
                (KeyFormat::LloydMax { bits: 3 }, ValueFormat::Uniform { bits: 4 })
            }
            CacheDtype::TurboQuant(Preset::ThreeBitNc) => {
                (KeyFormat::LloydMax { bits: 3 }, ValueFormat::Uniform { bits: 3 })
            }
        };
        RowFormat { key, value }
    }
}

impl fmt::Display for CacheDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no cache dtype.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is no KV cache dtype; use auto, fp8, turboquant_k8v4, turboquant_4bit_nc, \
     turboquant_k3v4_nc or turboquant_3bit_nc"
)]
pub struct UnknownCacheDtype(pub String);

impl FromStr for CacheDtype {
    type Err = UnknownCacheDtype;
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        CacheDtype::ALL
            .into_iter()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| UnknownCacheDtype(name.to_owned()))
    }
}

/// How one head's key at one token is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyFormat {
    /// `head_dim` elements as they are.
    Native(NativeDtype),
    /// `head_dim` bytes e4m3, scale 1.0, not rotated.
    Fp8,
    /// Rotated; `bits` (3 or 4) per element, then the fp16 norm.
    LloydMax {
        /// Bits of a code.
        bits: u8,
    },
}

/// How one head's value at one token is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ValueFormat {
    /// `head_dim` elements as they are.
    Native(NativeDtype),
    /// `head_dim` bytes e4m3, scale 1.0.
    Fp8,
    /// `bits` (3 or 4) per element on an even grid, then fp16 scale and fp16 minimum.
    Uniform {
        /// Bits of a code.
        bits: u8,
    },
}

/// Key row and value row of one head at one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowFormat {
    /// The key's half.
    pub key: KeyFormat,
    /// The value's half.
    pub value: ValueFormat,
}
