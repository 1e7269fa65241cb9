//! Bytes of recurrent states.
//!
//! A convolution of kernel `k` keeps its last `k - 1` inputs, in the model's dtype. A recurrent state
//! is kept in f32 unless the config names a dtype for it: it is updated once a token, for as long as
//! the sequence, and rounds each time.

use turboquant::format::NativeDtype;

use super::{ConfigError, StateSpec, fields::Fields};

/// Element sizes of both kinds of state.
#[derive(Debug, Clone, Copy)]
pub(super) struct StateDtypes {
    conv_bytes: usize,
    recurrent_bytes: usize,
    named: bool,
}

impl StateDtypes {
    /// Of a model of dtype `dtype`.
    pub(super) fn of(fields: &Fields<'_>, dtype: NativeDtype) -> Result<Self, ConfigError> {
        let (mut recurrent_bytes, mut named) = (4, false);
        for key in ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"] {
            if let Some(name) = fields.text(key)? {
                named = true;
                recurrent_bytes = match name {
                    "float32" => 4,
                    "float16" | "bfloat16" => 2,
                    "auto" => dtype.bytes(),
                    other => {
                        let problem =
                            format!("'{other}' is no dtype of a state; use float32, bfloat16 or float16");
                        return Err(fields.inconsistent(key, problem));
                    }
                };
            }
        }
        Ok(StateDtypes { conv_bytes: dtype.bytes(), recurrent_bytes, named })
    }
}

/// Elements of one layer's state.
#[derive(Debug, Clone, Copy)]
pub(super) struct StateShape {
    /// Channels of the convolution, those of groups included.
    pub conv_channels: usize,
    /// Channels that belong to groups.
    pub grouped_channels: usize,
    /// Groups; 1 where there is none.
    pub num_groups: usize,
    /// Kernel of the convolution.
    pub kernel: usize,
    /// Elements of the recurrent state.
    pub recurrent: usize,
    /// Heads (or channels) that ranks can take whole.
    pub num_heads: usize,
}

impl StateShape {
    /// In bytes. Counts and widths are bounded when they are read, so that no product here overflows
    /// 64 bits unless the file lies; then it is refused.
    pub(super) fn spec(self, fields: &Fields<'_>, dtypes: StateDtypes) -> Result<StateSpec, ConfigError> {
        let kept = self.kernel.saturating_sub(1);
        let conv = |channels: usize| channels.checked_mul(kept)?.checked_mul(dtypes.conv_bytes);
        let bytes = || {
            Some(StateSpec {
                conv_bytes: conv(self.conv_channels)?,
                recurrent_bytes: self.recurrent.checked_mul(dtypes.recurrent_bytes)?,
                num_heads: self.num_heads,
                grouped_conv_bytes: conv(self.grouped_channels)?,
                num_groups: self.num_groups,
                dtype_named: dtypes.named,
            })
        };
        let problem = "the recurrent state would take more bytes than 64 bits count".to_owned();
        bytes().ok_or_else(|| fields.inconsistent("num_hidden_layers", problem))
    }
}

/// Mamba-2: `heads * head_dim` channels, B and C per group.
pub(super) fn mamba2(
    heads: usize,
    head_dim: usize,
    groups: usize,
    state: usize,
    kernel: usize,
) -> StateShape {
    let inner = heads.saturating_mul(head_dim);
    let grouped_channels = groups.saturating_mul(state).saturating_mul(2);
    StateShape {
        conv_channels: inner.saturating_add(grouped_channels),
        grouped_channels,
        num_groups: groups,
        kernel,
        recurrent: inner.saturating_mul(state),
        num_heads: heads,
    }
}

/// Mamba-1: a state of `state` per channel.
pub(super) fn mamba1(inner: usize, state: usize, kernel: usize) -> StateShape {
    StateShape { recurrent: inner.saturating_mul(state), ..channels(inner, kernel) }
}

/// A convolution over `channels` and nothing else.
pub(super) fn channels(channels: usize, kernel: usize) -> StateShape {
    StateShape {
        conv_channels: channels,
        grouped_channels: 0,
        num_groups: 1,
        kernel,
        recurrent: 0,
        num_heads: channels,
    }
}

/// Delta rule: keys, queries and values are convolved; the state maps keys to values per value head.
pub(super) fn delta_rule(
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    kernel: usize,
) -> StateShape {
    let keys = key_heads.saturating_mul(key_dim).saturating_mul(2);
    StateShape {
        conv_channels: keys.saturating_add(value_heads.saturating_mul(value_dim)),
        grouped_channels: 0,
        num_groups: 1,
        kernel,
        recurrent: value_heads.saturating_mul(key_dim).saturating_mul(value_dim),
        num_heads: greatest_common_divisor(key_heads, value_heads),
    }
}

/// Linear attention without a convolution: one square state per head.
pub(super) fn linear_attention(heads: usize, head_dim: usize) -> StateShape {
    StateShape {
        conv_channels: 0,
        grouped_channels: 0,
        num_groups: 1,
        kernel: 1,
        recurrent: heads.saturating_mul(head_dim).saturating_mul(head_dim),
        num_heads: heads,
    }
}

fn greatest_common_divisor(mut a: usize, mut b: usize) -> usize {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
