//! What one of `ranks` tensor-parallel ranks stores of a layer.

use crate::config::{AttentionSpec, CacheSpec, CompressedSpec, StateSpec};

/// The share of one rank: KV heads are divided, and replicated when there are more ranks than heads;
/// a latent or compressed vector belongs to all heads and is not divided.
///
/// # Errors
/// A sentence that names the count which `ranks` does not divide.
pub(super) fn share(spec: &CacheSpec, ranks: usize) -> Result<CacheSpec, String> {
    Ok(match spec {
        CacheSpec::Attention(attention) => CacheSpec::Attention(attention_share(attention, ranks)?),
        CacheSpec::Hybrid(attention, state) => {
            CacheSpec::Hybrid(attention_share(attention, ranks)?, state_share(state, ranks)?)
        }
        CacheSpec::Recurrent(state) => CacheSpec::Recurrent(state_share(state, ranks)?),
        CacheSpec::Latent { num_qo_heads, .. }
        | CacheSpec::Compressed(CompressedSpec { num_qo_heads, .. }) => {
            query_heads(*num_qo_heads, ranks)?;
            *spec
        }
        CacheSpec::Shared { .. } | CacheSpec::None => *spec,
    })
}

fn query_heads(heads: usize, ranks: usize) -> Result<usize, String> {
    if heads.is_multiple_of(ranks) {
        Ok(heads / ranks)
    } else {
        Err(format!("{heads} query heads do not divide by {ranks}"))
    }
}

fn attention_share(spec: &AttentionSpec, ranks: usize) -> Result<AttentionSpec, String> {
    let num_qo_heads = query_heads(spec.num_qo_heads, ranks)?;
    let num_kv_heads = divide_or_replicate(spec.num_kv_heads, ranks)
        .ok_or_else(|| format!("{} KV heads neither divide by {ranks} nor into it", spec.num_kv_heads))?;
    Ok(AttentionSpec { num_qo_heads, num_kv_heads, ..*spec })
}

fn state_share(spec: &StateSpec, ranks: usize) -> Result<StateSpec, String> {
    if !spec.num_heads.is_multiple_of(ranks) {
        return Err(format!("{} state heads do not divide by {ranks}", spec.num_heads));
    }
    let num_groups = divide_or_replicate(spec.num_groups, ranks)
        .ok_or_else(|| format!("{} state groups neither divide by {ranks} nor into it", spec.num_groups))?;
    let grouped_conv_bytes = spec.grouped_conv_bytes / spec.num_groups.max(1) * num_groups;
    Ok(StateSpec {
        conv_bytes: (spec.conv_bytes - spec.grouped_conv_bytes) / ranks + grouped_conv_bytes,
        recurrent_bytes: spec.recurrent_bytes / ranks,
        num_heads: spec.num_heads / ranks,
        grouped_conv_bytes,
        num_groups,
        dtype_named: spec.dtype_named,
    })
}

/// Units of a rank: `count / ranks`, or 1 when each unit goes to several ranks whole.
fn divide_or_replicate(count: usize, ranks: usize) -> Option<usize> {
    if count == 0 {
        None
    } else if count.is_multiple_of(ranks) {
        Some(count / ranks)
    } else if ranks.is_multiple_of(count) {
        Some(1)
    } else {
        None
    }
}
