//! What a cache could not store exactly, in sentences.

use turboquant::rows::EncodeReport;
use turboquant_engine::cache::CacheHealth;

type Count = fn(&EncodeReport) -> u64;

/// One sentence per kind of departure that has happened, with the layers it happened in.
pub(crate) fn warnings(health: &CacheHealth) -> Vec<String> {
    let kinds: [(Count, &str, &str); 4] = [
        (
            |report| report.fp8_clipped,
            "elements beyond 448 were clipped to fit e4m3",
            "keep these layers at the model's dtype with --kv-cache-dtype-skip-layers",
        ),
        (
            |report| report.saturated,
            "numbers beyond the range of their type were cut to its largest value",
            "keep these layers at the model's dtype with --kv-cache-dtype-skip-layers",
        ),
        (
            |report| report.underflowed,
            "norms or scales were too small for fp16 and became 0",
            "keep these layers at the model's dtype with --kv-cache-dtype-skip-layers",
        ),
        (
            |report| report.non_finite,
            "elements were NaN or infinite before they were stored",
            "the model's weights or its input are at fault, whatever the cache",
        ),
    ];
    kinds.iter().filter_map(|&(count, what, remedy)| warning(health, count, what, remedy)).collect()
}

fn warning(health: &CacheHealth, count: Count, what: &str, remedy: &str) -> Option<String> {
    let hit = health.layers.iter().enumerate().filter(|(_, report)| count(report) > 0);
    let layers: Vec<String> = hit.map(|(layer, _)| layer.to_string()).collect();
    let total: u64 = health.layers.iter().map(count).sum();
    (total > 0).then(|| format!("warning: {total} {what}, in layers {}; {remedy}", layers.join(",")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clean_cache_says_nothing_and_others_name_layers_and_counts() {
        let mut health = CacheHealth { layers: vec![EncodeReport::default(); 4] };
        assert!(warnings(&health).is_empty());
        health.layers[1].fp8_clipped = 2;
        health.layers[3].fp8_clipped = 5;
        health.layers[2].non_finite = 1;
        let warnings = warnings(&health);
        assert_eq!(warnings.len(), 2);
        assert!(warnings[0].starts_with("warning: 7 elements beyond 448"), "{}", warnings[0]);
        assert!(warnings[0].contains("in layers 1,3;"), "{}", warnings[0]);
        assert!(warnings[1].contains("NaN or infinite") && warnings[1].contains("in layers 2;"));
    }
}
