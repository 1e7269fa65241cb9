//! What a cache is made of, in a table for people.

use turboquant::format::{CacheDtype, KeyFormat, NativeDtype, RowFormat};
use turboquant_engine::plan::{FormatReason, Lifetime, PagedPlan, Plan};

/// Rows of text in aligned columns.
pub(crate) struct Table {
    align_right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Column names; columns of numbers, whose names begin with `>`, are aligned to the right.
    pub(crate) fn new(columns: &[&str]) -> Self {
        let names = columns.iter().map(|name| name.trim_start_matches('>').to_owned()).collect();
        let align_right = columns.iter().map(|name| name.starts_with('>')).collect();
        Self { align_right, rows: vec![names] }
    }

    pub(crate) fn row<Cell: Into<String>>(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns = 0..self.align_right.len();
        let widths: Vec<usize> = columns
            .map(|column| {
                let cells = self.rows.iter().filter_map(|row| row.get(column));
                cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
            })
            .collect();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, &width), &right) in row.iter().zip(&widths).zip(&self.align_right) {
                let gap = if line.is_empty() { "" } else { "  " };
                if right {
                    line.push_str(&format!("{gap}{cell:>width$}"));
                } else {
                    line.push_str(&format!("{gap}{cell:<width$}"));
                }
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Formats in effect and bytes per token, in lines for stderr.
pub(crate) fn cache_summary(plan: &Plan) -> String {
    let (bytes, bf16) = sequence_bytes(plan, 1);
    let ratio = bf16 as f64 / bytes.max(1) as f64;
    format!(
        "{}per token     {} B, in bf16 {} B: ratio {ratio:.2}",
        layer_table(plan),
        grouped(bytes),
        grouped(bf16)
    )
}

/// One line per run of layers that store the same: layers, format, why, bytes per token.
fn layer_table(plan: &Plan) -> Table {
    let mut table = Table::new(&["layers", "format", "why", ">B/token"]);
    let paged: Vec<(usize, PagedPlan)> =
        plan.layers.iter().enumerate().filter_map(|(layer, l)| l.paged.map(|paged| (layer, paged))).collect();
    for run in paged.chunk_by(|a, b| b.0 == a.0 + 1 && same(plan, &a.1, &b.1)) {
        let (first, last, paged) = (run[0].0, run[run.len() - 1].0, run[0].1);
        let layers = if first == last { first.to_string() } else { format!("{first}-{last}") };
        let mut why = reason(paged.reason).to_owned();
        if let Lifetime::Window(window) = plan.groups[paged.group].lifetime {
            why = format!("{why}, window {window}");
        }
        let bytes = run.len() * paged.page_bytes / plan.page_size;
        table.row([layers, format_name(paged.format), why, grouped(bytes as u64)]);
    }
    table
}

fn same(plan: &Plan, a: &PagedPlan, b: &PagedPlan) -> bool {
    let key =
        |paged: &PagedPlan| (paged.format, paged.reason, paged.page_bytes, plan.groups[paged.group].lifetime);
    key(a) == key(b)
}

fn reason(reason: FormatReason) -> &'static str {
    match reason {
        FormatReason::Requested => "as asked",
        FormatReason::Boundary => "boundary layer",
        FormatReason::SkipList => "skip list",
        FormatReason::KeyBias => "large key bias",
        FormatReason::Window => "skip list: sliding window",
        FormatReason::Latent => "latent",
    }
}

/// The name a user would ask for the rows by.
pub(crate) fn format_name(format: RowFormat) -> String {
    if let KeyFormat::Native(native) = format.key {
        let dtype = match native {
            NativeDtype::F32 => "f32",
            NativeDtype::F16 => "f16",
            NativeDtype::Bf16 => "bf16",
        };
        return format!("auto ({dtype})");
    }
    let named = CacheDtype::ALL.into_iter().find(|dtype| dtype.row_format(NativeDtype::Bf16) == format);
    named.map_or_else(|| format!("{format:?}"), |dtype| dtype.name().to_owned())
}

/// Bytes of the pages of one sequence of `tokens` tokens, in the plan's formats and in bf16. Window
/// layers hold their window only.
pub(crate) fn sequence_bytes(plan: &Plan, tokens: usize) -> (u64, u64) {
    let held = |group: usize| match plan.groups[group].lifetime {
        Lifetime::Full => tokens as u64,
        Lifetime::Window(window) => tokens.min(window) as u64,
    };
    let mut bytes = (0, 0);
    for paged in plan.layers.iter().filter_map(|layer| layer.paged) {
        let tokens = held(paged.group);
        let elements = paged.num_kv_heads * (paged.key_head_dim + paged.value_head_dim);
        bytes.0 += tokens * (paged.page_bytes / plan.page_size) as u64;
        bytes.1 += tokens * 2 * elements as u64;
    }
    bytes
}

/// `12,345`
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `1.5 MiB`
pub(crate) fn size(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0..0x10_0000 => (10, "KiB"),
        0x10_0000..0x4000_0000 => (20, "MiB"),
        _ => (30, "GiB"),
    };
    format!("{:.1} {name}", bytes as f64 / (1u64 << unit) as f64)
}

#[cfg(test)]
mod tests {
    use turboquant_engine::{
        config::{AttentionSpec, CacheSpec, ModelConfig},
        plan::{Budget, PlanOptions},
    };

    use super::*;

    #[test]
    fn numbers() {
        assert_eq!([0, 999, 1000, 1234567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0, 1536, 3 << 19, 5 << 30].map(size), ["0.0 KiB", "1.5 KiB", "1.5 MiB", "5.0 GiB"]);
    }

    #[test]
    fn every_dtype_has_its_name() {
        for dtype in CacheDtype::ALL.into_iter().skip(1) {
            assert_eq!(format_name(dtype.row_format(NativeDtype::F16)), dtype.name());
        }
        assert_eq!(format_name(CacheDtype::Auto.row_format(NativeDtype::F16)), "auto (f16)");
    }

    /// 30 layers of 3 heads of 64 (SmolLM2): 768 B per layer in 16 bits; a 4-bit row pair takes
    /// 34 + 36 B per head, so 210 B per layer.
    #[test]
    fn runs_of_equal_layers_are_folded() {
        let spec = AttentionSpec {
            num_qo_heads: 9,
            num_kv_heads: 3,
            key_head_dim: 64,
            value_head_dim: 64,
            window: None,
        };
        let config = ModelConfig::new("llama", NativeDtype::F16, 8192, vec![CacheSpec::Attention(spec); 30]);
        let options = PlanOptions {
            dtype: "turboquant_4bit_nc".parse().unwrap(),
            budget: Budget::Tokens(8192),
            ..PlanOptions::default()
        };
        let plan = Plan::build(&config, &options).unwrap();
        let text = layer_table(&plan).to_string();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert_eq!(lines[1], ["0-1", "auto", "(f16)", "boundary", "layer", "1,536"]);
        assert_eq!(lines[2], ["2-27", "turboquant_4bit_nc", "as", "asked", "5,460"]);
        assert_eq!(lines[3], ["28-29", "auto", "(f16)", "boundary", "layer", "1,536"]);
        assert_eq!(sequence_bytes(&plan, 1000), (1000 * (5460 + 2 * 1536), 1000 * 23_040));
    }
}
