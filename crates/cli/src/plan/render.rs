//! The plan as text: aligned by hand, exact bytes beside rounded sizes.

use std::fmt::Write;

use turboquant::format::CacheDtype;
use turboquant_engine::plan::{
    VllmPages,
    report::{GroupReport, LayerReport, Report},
};

use super::units::{rate, size};
use crate::report::{Table, grouped};

/// A label and what it is.
fn line(out: &mut String, label: &str, value: &str) {
    let _ = writeln!(out, "{label:<30}  {value}");
}

/// The whole plan.
pub(super) fn plan(report: &Report, memory: Option<u64>, reserve: Option<u64>) -> String {
    let mut out = heading(report);
    out.push('\n');
    out.push_str(&layers(report));
    out.push('\n');
    out.push_str(&rates(report));
    out.push('\n');
    out.push_str(&pools(report));
    out.push('\n');
    out.push_str(&capacity(report, memory, reserve));
    if !report.notices.is_empty() {
        out.push_str("\nNotices\n");
        for notice in &report.notices {
            let _ = writeln!(out, "  {notice}");
        }
    }
    out
}

fn heading(report: &Report) -> String {
    let (model, options) = (&report.model, &report.options);
    let mut out = format!(
        "{} ({}): {} layers{}, {}, sequences of up to {} tokens{}\n",
        model.name,
        model.model_type,
        model.num_layers,
        if model.hybrid { ", hybrid" } else { "" },
        model.dtype,
        grouped(model.max_model_len as u64),
        if model.learned_sinks { ", learned attention sinks" } else { "" },
    );
    let _ = writeln!(
        out,
        "KV cache {}, pages of {} tokens, {} sequences at once{}",
        options.kv_cache_dtype,
        options.page_size,
        options.max_num_seqs,
        match options.tensor_parallel_size {
            1 => String::new(),
            ranks => format!(", one of {ranks} tensor-parallel ranks"),
        }
    );
    out
}

/// Equal layers on one line.
fn layers(report: &Report) -> String {
    let mut kinds: Vec<(Vec<String>, Vec<usize>)> = Vec::new();
    for layer in &report.layers {
        let line = layer_line(layer);
        match kinds.iter_mut().find(|(known, _)| *known == line) {
            Some((_, layers)) => layers.push(layer.layer),
            None => kinds.push((line, vec![layer.layer])),
        }
    }
    let mut table =
        Table::new(&["Layers", ">", "Holds", "Heads", "Format", "Why", ">B/token", ">State B/seq"]);
    for (line, layers) in kinds {
        table.row([runs(&layers), format!("({})", layers.len())].into_iter().chain(line));
    }
    let mut out = table.to_string();
    if report.layers.iter().any(|layer| !layer.side.is_empty()) {
        out.push_str("Behind the +: indexer keys and compressed vectors, always in the model's dtype.\n");
    }
    out
}

fn layer_line(layer: &LayerReport) -> Vec<String> {
    let window = layer.window.map_or_else(String::new, |window| grouped(window as u64));
    let holds = match layer.kind {
        "full_attention" => "all tokens".to_owned(),
        "sliding_attention" => format!("window of {window}"),
        "chunked_attention" => format!("chunk of {window}"),
        "latent" => "latent of all tokens".to_owned(),
        "compressed" if layer.side.is_empty() => format!("window of {window}"),
        "compressed" => format!("window of {window}, compressed"),
        "recurrent" => "state".to_owned(),
        "hybrid" if layer.window.is_some() => format!("window of {window}, state"),
        "hybrid" => "all tokens, state".to_owned(),
        "shared" => layer.owner.map_or_else(String::new, |owner| format!("nothing: reads layer {owner}")),
        _ => "nothing".to_owned(),
    };
    let heads = match (layer.num_kv_heads, layer.key_head_dim, layer.value_head_dim) {
        (Some(_), Some(key), Some(0)) => key.to_string(),
        (Some(heads), Some(key), Some(value)) if key == value => format!("{heads} x {key}"),
        (Some(heads), Some(key), Some(value)) => format!("{heads} x {key}/{value}"),
        _ => "-".to_owned(),
    };
    let side: f64 = layer.side.iter().map(|side| side.bytes_per_token).sum();
    let bytes = match layer.bytes_per_token {
        Some(bytes) if side > 0.0 => format!("{} + {}", grouped(bytes), rate(side)),
        Some(bytes) => grouped(bytes),
        None => "-".to_owned(),
    };
    let because = match layer.reason {
        Some("requested") => "asked for",
        Some("boundary") => "boundary",
        Some("skip_list") => "skip list",
        Some("sliding_window") => "skip list: window",
        Some("key_bias") => "large key bias",
        Some("latent") => "latent",
        _ => "-",
    };
    let state = if layer.state_bytes > 0 { grouped(layer.state_bytes) } else { "-".to_owned() };
    vec![holds, heads, layer.format.unwrap_or("-").to_owned(), because.to_owned(), bytes, state]
}

/// `0-2, 4-6, ... 36-38`: runs, and three or more runs of one rhythm as the first two and the last.
fn runs(layers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &layer in layers {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == layer => *end = layer,
            _ => runs.push((layer, layer)),
        }
    }
    let text = |&(start, end): &(usize, usize)| match end - start {
        0 => start.to_string(),
        _ => format!("{start}-{end}"),
    };
    let mut parts = Vec::new();
    let mut at = 0;
    while at < runs.len() {
        let step = |index: usize| (runs[index + 1].0 - runs[index].0, runs[index + 1].1 - runs[index].1);
        let mut last = at;
        while last + 1 < runs.len() && step(last) == step(at) {
            last += 1;
        }
        if last >= at + 3 {
            parts.push(format!("{}, {}, ... {}", text(&runs[at]), text(&runs[at + 1]), text(&runs[last])));
            at = last + 1;
        } else {
            parts.push(text(&runs[at]));
            at += 1;
        }
    }
    parts.join(", ")
}

fn times(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}x"))
}

fn rates(report: &Report) -> String {
    let (ours, bf16) = (report.bytes_per_token, report.bf16_bytes_per_token);
    let windows = report.groups.iter().any(|group| group.window.is_some());
    let beyond_ratio = (ours.beyond_window > 0.0).then(|| bf16.beyond_window / ours.beyond_window);
    let mut table = match windows {
        true => Table::new(&["Bytes per token", ">inside the windows", ">beyond them"]),
        false => Table::new(&["Bytes per token", ">"]),
    };
    let mut row = |name: &str, inside: String, beyond: String| match windows {
        true => table.row([name.to_owned(), inside, beyond]),
        false => table.row([name.to_owned(), inside]),
    };
    row("  this plan", rate(ours.inside_window), rate(ours.beyond_window));
    if report.side_bytes_per_token > 0.0 {
        let side = rate(report.side_bytes_per_token);
        row("    of that, behind the +", side.clone(), side);
    }
    row("  bf16 in all layers", rate(bf16.inside_window), rate(bf16.beyond_window));
    row("  bf16 / this plan", times(report.ratio_to_bf16.inside_window), times(beyond_ratio));
    let mut out = table.to_string();
    let ratio = report.ratio_to_bf16;
    let _ = write!(
        out,
        "Whole model against bf16, one sequence of {} tokens: {}",
        grouped(report.capacity.max_model_len as u64),
        times(ratio.at_max_model_len)
    );
    if report.states.bytes_per_sequence > 0 {
        let _ = write!(
            out,
            " ({} with its states, which stay as they are)",
            times(ratio.at_max_model_len_with_states)
        );
    }
    out.push('\n');
    out
}

fn pools(report: &Report) -> String {
    let mut table = Table::new(&["Pools", ">layers", ">B/page", ">pages", ">bytes", ">"]);
    for group in &report.groups {
        table.row([
            format!("  {}", group_name(group)),
            group.layers.len().to_string(),
            grouped(group.page_bytes),
            grouped(group.num_pages as u64),
            grouped(group.bytes),
            size(group.bytes),
        ]);
    }
    if report.states.num_states > 0 {
        let layers = report.layers.iter().filter(|layer| layer.state_bytes > 0).count();
        table.row([
            "  states, one per sequence".to_owned(),
            layers.to_string(),
            format!("{} each", grouped(report.states.bytes_per_sequence)),
            grouped(report.states.num_states as u64),
            grouped(report.states.bytes),
            size(report.states.bytes),
        ]);
    }
    let total = report.capacity.total_bytes;
    table.row(["  in all".into(), String::new(), String::new(), String::new(), grouped(total), size(total)]);
    let mut out = table.to_string();
    out.push_str(&split_rule(report));
    out
}

fn group_name(group: &GroupReport) -> String {
    match (group.window, group.tokens_per_row) {
        (Some(window), _) => format!("window of {}", grouped(window as u64)),
        (None, 1) => "all tokens".to_owned(),
        (None, tokens) => format!("one row per {tokens} tokens"),
    }
}

/// How the split was made, in one or two sentences.
fn split_rule(report: &Report) -> String {
    let options = &report.options;
    let windows = report.groups.iter().any(|group| group.window.is_some());
    let states = report.states.num_states > 0;
    let mut out = String::new();
    if states {
        let _ = writeln!(
            out,
            "States come first, {} of them (--max-num-seqs); pages get the rest.",
            options.max_num_seqs
        );
    }
    if windows {
        let _ = writeln!(
            out,
            "A window's pool holds the windows of {} sequences (--max-num-seqs) and {} tokens of prompt \
             (--max-num-batched-tokens),\nor as many pages as the pool for all tokens, if that is fewer: it never runs out first.",
            options.max_num_seqs,
            grouped(options.max_num_batched_tokens as u64)
        );
    }
    out
}

fn capacity(report: &Report, memory: Option<u64>, reserve: Option<u64>) -> String {
    let (capacity, weights) = (&report.capacity, &report.weights);
    let exact = |bytes: u64| format!("{} ({} B)", size(bytes), grouped(bytes));
    let mut out = String::new();
    if let Some(memory) = memory {
        line(&mut out, "Memory of the device", &exact(memory));
    }
    let source = match (weights.source, weights.tensors, weights.parameters, weights.bits_per_weight) {
        ("estimated", _, Some(parameters), Some(bits)) => {
            format!(", estimated: {:.2} billion parameters of {bits} bits", parameters as f64 / 1e9)
        }
        (source, Some(tensors), ..) => format!(", counted in {source} ({} tensors)", grouped(tensors as u64)),
        _ => String::new(),
    };
    let share = if report.options.tensor_parallel_size > 1 { " (a rank's even share)" } else { "" };
    let known = weights.bytes_per_rank.map(|bytes| format!("{}{source}", exact(bytes)));
    line(
        &mut out,
        &format!("Weights{share}"),
        &known.unwrap_or_else(|| "unknown: the config does not say enough".to_owned()),
    );
    if let Some(reserve) = reserve {
        line(&mut out, "Reserve", &exact(reserve));
    }
    line(&mut out, "KV cache", &exact(capacity.total_bytes));
    if let Some(unused) = capacity.unused_bytes {
        line(&mut out, "Left over", &exact(unused));
    }
    line(&mut out, "Tokens that fit", &format!("{} over all sequences", grouped(capacity.tokens)));
    line(
        &mut out,
        &format!("At {} tokens each", grouped(capacity.max_model_len as u64)),
        &format!(
            "{:.2} sequences at once, {} each",
            capacity.sequences_at_max_model_len,
            size(capacity.sequence_bytes)
        ),
    );
    if memory.is_some() && reserve.is_none() {
        out.push_str(
            "Activations and the runtime are not in these figures; keep room for them with --reserve.\n",
        );
    }
    out
}

/// What planning for fewer sequences brings.
pub(super) fn fewer_sequences(max_num_seqs: usize, report: &Report) -> String {
    format!(
        "\nWith --max-num-seqs {max_num_seqs}, {} tokens fit: window pools and states are smaller.\n",
        grouped(report.capacity.tokens)
    )
}

/// All formats side by side.
pub(super) fn comparison(reports: &[(CacheDtype, Result<Report, String>)]) -> String {
    let mut table = Table::new(&[
        "Format",
        ">B/token inside",
        ">beyond",
        ">against bf16",
        ">tokens that fit",
        ">longest",
        ">sequences at it",
        ">cache",
    ]);
    let mut refusals = String::new();
    for (dtype, report) in reports {
        match report {
            Ok(report) => {
                let capacity = &report.capacity;
                table.row([
                    dtype.name().to_owned(),
                    rate(report.bytes_per_token.inside_window),
                    rate(report.bytes_per_token.beyond_window),
                    times(report.ratio_to_bf16.at_max_model_len),
                    grouped(capacity.tokens),
                    grouped(capacity.max_model_len as u64),
                    format!("{:.2}", capacity.sequences_at_max_model_len),
                    size(capacity.total_bytes),
                ]);
            }
            Err(refusal) => {
                table.row([dtype.name()].into_iter().chain(["-"; 7]));
                let _ = writeln!(refusals, "{}: {refusal}", dtype.name());
            }
        }
    }
    format!("\n{table}{refusals}")
}

/// vLLM's pages.
pub(super) fn vllm(report: &Report, pages: &VllmPages) -> String {
    let mut out = format!("\nAs vLLM 0.33 would lay it out with {}\n", report.options.kv_cache_dtype);
    let mut row = |name: &str, value: String| {
        let _ = writeln!(out, "  {name:<42}  {value}");
    };
    let native = match pages.native_layers.as_slice() {
        [] => "none".to_owned(),
        layers => format!("{} ({} of {})", runs(layers), layers.len(), report.model.num_layers),
    };
    row("layers kept in the model's dtype", native);
    if let Some(page) = &pages.unified {
        row("bytes per token the block is a multiple of", grouped(page.bytes_per_token));
        row("block size", format!("{} tokens", grouped(page.packed_tokens)));
        if let Some(tokens) = page.native_tokens {
            row("block size of the layers kept", format!("{} tokens", grouped(tokens)));
        }
        row("page", format!("{} B", grouped(page.page_bytes)));
        row(
            "padding of a recurrent state",
            format!(
                "{} B on {} B ({:.2} %)",
                grouped(page.padding_bytes),
                grouped(page.state_bytes),
                page.padding_percent
            ),
        );
    } else {
        row("block size", format!("{} tokens", grouped(pages.block_tokens)));
        row("one block over all layers", format!("{} B", grouped(pages.block_bytes)));
    }
    let len = report.capacity.max_model_len as u64;
    let theirs = pages.sequence_bytes(len);
    let ours = report.capacity.sequence_bytes;
    row(
        &format!("one sequence of {} tokens", grouped(len)),
        format!(
            "{} ({}); this plan {}",
            size(theirs),
            times(Some(theirs as f64 / ours.max(1) as f64)),
            size(ours)
        ),
    );
    for refusal in &pages.refusals {
        let _ = writeln!(out, "  vLLM refuses or fails: {refusal}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_layers_fold() {
        let rows: [(Vec<usize>, &str); 6] = [
            (vec![0], "0"),
            ((0..32).collect(), "0-31"),
            (vec![0, 1, 30, 31], "0-1, 30-31"),
            ((3..40).step_by(4).collect(), "3, 7, ... 39"),
            ((0..40).filter(|layer| layer % 4 != 3).collect(), "0-2, 4-6, ... 36-38"),
            (vec![5, 12, 19, 26, 33, 42], "5, 12, ... 33, 42"),
        ];
        for (layers, text) in rows {
            assert_eq!(runs(&layers), text);
        }
    }
}
