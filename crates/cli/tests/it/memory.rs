//! What real models take in memory, as the program itself says at its end. The models are fetched if they
//! are not there.

use std::path::Path;

use crate::support::turboquant;

/// The `number`th size in MiB of the line of `summary` that begins with `field`.
fn mebibytes(summary: &str, field: &str, number: usize) -> f64 {
    let line = summary.lines().find(|line| line.starts_with(field)).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    let sizes = words.windows(2).filter(|pair| pair[1].trim_end_matches(',') == "MiB");
    sizes.map(|pair| pair[0].parse().unwrap()).nth(number).unwrap()
}

/// Peak memory within 10 % of weights, planned KV and 60 MB for all else.
fn check_memory(model: &str) {
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/hamlet.txt");
    let text = std::fs::read_to_string(text).unwrap();
    let output = turboquant()
        .args(["run", "-m", model, "--raw", "--kv-cache-dtype", "turboquant_4bit_nc", "--max-tokens", "4"])
        .args(["--max-model-len", "2560"])
        .arg(&text[..7000])
        .output()
        .unwrap();
    let summary = String::from_utf8(output.stderr).unwrap();
    let (peak, weights) = (mebibytes(&summary, "memory", 0), mebibytes(&summary, "memory", 1));
    let planned = mebibytes(&summary, "KV memory", 1);
    let bound = 1.1 * (weights + planned + 60e6 / f64::from(1 << 20));
    println!("{model}: {peak} MiB at most, weights {weights}, planned {planned}, bound {bound:.1}");
    assert!(peak > weights && peak < bound, "{summary}");
}

#[test]
#[ignore = "needs the model smollm2 (93 MB)"]
fn smollm2_stays_within_its_memory() {
    check_memory("smollm2");
}

#[test]
#[ignore = "needs the model gemma3-270m (238 MB, its own licence)"]
fn gemma3_270m_stays_within_its_memory() {
    check_memory("gemma3-270m");
}
