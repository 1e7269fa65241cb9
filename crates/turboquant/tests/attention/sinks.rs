//! Learned sinks: a logit that takes part in the sum and has no value.

use turboquant::attention::{AttentionParams, Cpu, PrefillChunk};

use crate::fixture::{Geometry, Layer, Threads, cpus, formats};

/// Logits, first value element of each token, sink, expected output.
type Case = (&'static [f32], &'static [f32], f32, f64);

const CASES: [Case; 6] = [
    (&[0.0, 0.0], &[1.0, 3.0], 0.0, 4.0 / 3.0),
    (&[2.0, -1.0, 0.5], &[1.0, -2.0, 4.0], 1.5, 0.953975),
    (&[0.0, 0.0], &[1.0, 3.0], f32::NEG_INFINITY, 2.0),
    (&[0.0, 0.0], &[1.0, 3.0], 1000.0, 0.0),
    (&[1000.0, 1000.0], &[1.0, 3.0], 0.0, 2.0),
    (&[], &[], 0.0, 0.0),
];

/// Keys that give the logits against the query (1, 0, 0, ...) with a scale of `largest`, and values
/// that are constant over their row: every format stores both exactly (the rotation of a key with one
/// element has equal magnitudes everywhere).
fn rows(logits: &[f32], values: &[f32], largest: f32) -> (Vec<f32>, Vec<f32>) {
    let keys = logits.iter().flat_map(|l| std::iter::once(l / largest).chain([0.0; 15])).collect();
    (keys, values.iter().flat_map(|v| [*v; 16]).collect())
}

fn close(got: f32, expected: f64, tolerance: f64) -> bool {
    (f64::from(got) - expected).abs() <= tolerance
}

#[test]
fn are_counted_once() {
    let geometry = Geometry::new(16, 1, 1, 16);
    let query = [[1.0].as_slice(), &[0.0; 15]].concat();
    for (name, format) in formats() {
        for (logits, values, sink, expected) in CASES {
            let mut layer = Layer::new(format, geometry, 4, 9);
            let sinks = [sink];
            let largest = logits.iter().fold(1.0, |max: f32, l| max.max(l.abs()));
            let params = AttentionParams { sinks: Some(&sinks), sm_scale: largest, ..geometry.params() };
            let (keys, values) = rows(logits, values, largest);
            // Products of words keep a score to about 2e-5 of itself.
            let tolerance = 2e-3 + 2e-5 * f64::from(largest);
            let mut sequence = layer.sequence(0);
            layer.append(&mut sequence, &keys, &values);
            for cpu in cpus() {
                let place = format!("{name} {logits:?} sink {sink} {}", cpu.isa.name());
                for threads in [1, 2, 7] {
                    let exec = Threads(threads);
                    let cpu = Cpu { exec: &exec, isa: cpu.isa };
                    let (out, _) = layer.decode(&cpu, &params, &query, &[sequence.row()]);
                    assert!(close(out[0], expected, tolerance), "{place}: decode gives {}", out[0]);
                }
                // The last token of a prefill sees the others packed or raw.
                let Some((last, first)) = logits.len().checked_sub(1).map(|n| (n, n * 16)) else { continue };
                let mut context = layer.sequence(0);
                layer.append(&mut context, &keys[..first], &values[..first]);
                for (context_len, from) in [(last, first), (0, 0)] {
                    let chunk = PrefillChunk {
                        queries: &query.repeat(logits.len() - context_len),
                        keys: &keys[from..],
                        values: &values[from..],
                        block_table: &context.block_table,
                        context_len,
                    };
                    let mut out = vec![f32::NAN; values.len() - from];
                    cpu.prefill(layer.pages(), &params, &chunk, &mut out).unwrap();
                    let got = out[out.len() - 16];
                    assert!(
                        close(got, expected, tolerance),
                        "{place}: prefill from {context_len} gives {got}"
                    );
                }
            }
        }
    }
}

/// A long sequence of equal logits and values: one sink among 2000 tokens in four splits.
#[test]
fn are_not_counted_per_split() {
    let geometry = Geometry::new(16, 1, 2, 16);
    for (name, format) in formats() {
        let mut layer = Layer::new(format, geometry, 130, 9);
        let mut sequence = layer.sequence(0);
        layer.append(&mut sequence, &[0.0; 2000 * 16], &[1.0; 2000 * 16]);
        // exp(7.6) is about 1998: as heavy as all tokens together.
        let sinks = [2000f32.ln(), 1000f32.ln()];
        let params = AttentionParams { sinks: Some(&sinks), ..geometry.params() };
        for cpu in cpus() {
            for threads in [1, 2, 7] {
                let exec = Threads(threads);
                let cpu = Cpu { exec: &exec, isa: cpu.isa };
                let (out, lse) = layer.decode(&cpu, &params, &[0.3; 32], &[sequence.row()]);
                let place = format!("{name} {} {threads}", cpu.isa.name());
                assert!(close(out[0], 0.5, 1e-4) && close(out[16], 2.0 / 3.0, 1e-4), "{place}: {out:?}");
                assert!(
                    close(lse[0], 4000f64.ln(), 1e-3) && close(lse[1], 3000f64.ln(), 1e-3),
                    "{place}: {lse:?}"
                );
            }
        }
    }
}
