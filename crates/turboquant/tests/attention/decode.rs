//! Decode over formats, widths, head groups, windows, caps, sinks, ragged lengths.

use turboquant::attention::AttentionParams;

use crate::{
    compare::assert_close,
    fixture::{Geometry, Layer, cpus, formats},
};

pub(crate) const GEOMETRIES: [Geometry; 12] = [
    Geometry::new(16, 1, 1, 16),
    Geometry::new(64, 3, 3, 16),
    Geometry::new(80, 2, 4, 32),
    Geometry::new(96, 1, 8, 16),
    Geometry::new(128, 2, 4, 16),
    Geometry::new(256, 1, 4, 64),
    Geometry::new(192, 1, 2, 48),
    Geometry::new(72, 2, 6, 16),
    Geometry::new(64, 1, 12, 256),
    Geometry { value_head_dim: 128, ..Geometry::new(192, 1, 5, 16) },
    Geometry { value_head_dim: 40, ..Geometry::new(24, 2, 7, 32) },
    Geometry { value_head_dim: 512, ..Geometry::new(576, 1, 1, 16) },
];

/// Every combination of a window, a soft cap and sinks that matters.
pub(crate) fn variants<'a>(
    geometry: &Geometry,
    sinks: &'a [f32],
) -> Vec<(&'static str, AttentionParams<'a>)> {
    let plain = geometry.params();
    let sinks = Some(&sinks[..geometry.num_qo_heads()]);
    vec![
        ("plain", plain),
        ("window 1", AttentionParams { window: Some(1), ..plain }),
        ("window 37", AttentionParams { window: Some(37), ..plain }),
        ("window 128, sinks", AttentionParams { window: Some(128), sinks, ..plain }),
        ("window above all", AttentionParams { window: Some(5000), ..plain }),
        ("soft cap", AttentionParams { soft_cap: Some(1.5), ..plain }),
        ("large scores", AttentionParams { sm_scale: 4.0 * plain.sm_scale, ..plain }),
        (
            "negative scale, cap, sinks",
            AttentionParams { sm_scale: -0.3, soft_cap: Some(20.0), sinks, ..plain },
        ),
        ("sinks", AttentionParams { sinks, ..plain }),
    ]
}

pub(crate) const SINKS: [f32; 16] =
    [0.5, -3.0, 2.0, f32::NEG_INFINITY, 0.0, 7.0, -0.1, 1.0, 3.0, -2.0, 100.0, 0.25, -9.0, 4.0, 1.5, -1.0];

#[test]
fn equals_the_oracle() {
    for (g, geometry) in GEOMETRIES.into_iter().enumerate() {
        for (name, format) in formats() {
            let mut layer = Layer::new(format, geometry, 110, g as u64);
            let sequences: Vec<_> =
                [0, 1, 15, 16, 17, 63, 64, 65, 127, 129, 550].map(|len| layer.sequence(len)).into();
            let queries = layer.queries(sequences.len());
            let rows: Vec<_> = sequences.iter().map(|s| s.row()).collect();
            let dense: Vec<_> = sequences.iter().map(|s| layer.dense(s)).collect();
            for (variant, params) in variants(&geometry, &SINKS) {
                let (mut out, mut lse) = (Vec::new(), Vec::new());
                for ((dense, sequence), query) in
                    dense.iter().zip(&sequences).zip(queries.chunks_exact(queries.len() / rows.len()))
                {
                    let first = params.window.map_or(0, |window| sequence.len.saturating_sub(window));
                    let seen = first..sequence.len;
                    let (one_out, one_lse) = dense.attend(&params, query, seen, geometry.value_head_dim);
                    out.extend(one_out);
                    lse.extend(one_lse);
                }
                for cpu in cpus() {
                    let place = format!("{name} {geometry:?} {variant} {}", cpu.isa.name());
                    let (got, got_lse) = layer.decode(&cpu, &params, &queries, &rows);
                    let error = assert_close(&place, cpu.isa, &got, &out, geometry.value_head_dim);
                    if std::env::var_os("PRINT_ERRORS").is_some() {
                        println!("{error:.1e} {place}");
                    }
                    for (i, (got, expected)) in got_lse.iter().zip(&lse).enumerate() {
                        let close = f64::from(*got) == *expected || (f64::from(*got) - expected).abs() < 2e-3;
                        assert!(close, "{place}: lse {i} is {got}, expected {expected}");
                    }
                }
            }
        }
    }
}

/// Rows of one sequence, each seeing one token more: what a replay or a verified draft asks for.
#[test]
fn rows_of_one_sequence_are_causal() {
    let geometry = Geometry::new(64, 2, 2, 16);
    for (name, format) in formats() {
        let mut layer = Layer::new(format, geometry, 12, 7);
        let sequence = layer.sequence(130);
        let dense = layer.dense(&sequence);
        let queries = layer.queries(9);
        let rows: Vec<_> = (122..=130)
            .map(|seq_len| turboquant::attention::DecodeRow { block_table: &sequence.block_table, seq_len })
            .collect();
        for cpu in cpus() {
            let (got, _) = layer.decode(&cpu, &geometry.params(), &queries, &rows);
            let expected: Vec<f64> = rows
                .iter()
                .zip(queries.chunks_exact(queries.len() / rows.len()))
                .flat_map(|(row, query)| dense.attend(&geometry.params(), query, 0..row.seq_len, 64).0)
                .collect();
            assert_close(&format!("{name} {}", cpu.isa.name()), cpu.isa, &got, &expected, 64);
        }
    }
}
