//! What a result must not depend on: unused bytes, other rows, threads, spare table entries.

use turboquant::{
    attention::{AttentionParams, Cpu, DecodeRow, PrefillChunk},
    exec::{Rayon, Serial},
    rows::Isa,
};

use crate::{
    compare::assert_same_bits,
    decode::{SINKS, variants},
    fixture::{Geometry, Layer, Threads, cpus, formats},
};

/// Unused slots hold zeros, NaN patterns, infinities or ones; tables are longer than needed.
#[test]
fn unused_bytes_and_entries_do_not_matter() {
    let geometry = Geometry::new(128, 2, 2, 16);
    for (name, format) in formats() {
        for len in [1, 5, 15, 16, 17, 33] {
            let mut results: Vec<Vec<f32>> = Vec::new();
            // 0x7C in both bytes of a half is a NaN; 0x00 0x7C is infinity.
            for fill in [[0x00, 0x00], [0xFF, 0xFF], [0x00, 0x7C], [0x80, 0x7F], [0x11, 0x11]] {
                let mut layer = Layer::new(format, geometry, 6, len as u64);
                for pair in layer.slab.chunks_exact_mut(2) {
                    pair.copy_from_slice(&fill);
                }
                let sequence = layer.sequence(len);
                let (queries, (keys, values)) = (layer.queries(3), layer.rows(3));
                for tail in [&[][..], &[0, 0], &[-1, -1, -1], &[-1, i32::MIN, i32::MAX, u32::MAX as i32]] {
                    let table: Vec<i32> = sequence.block_table.iter().chain(tail).copied().collect();
                    let rows = [DecodeRow { block_table: &table, seq_len: len }];
                    let chunk = PrefillChunk {
                        queries: &queries,
                        keys: &keys,
                        values: &values,
                        block_table: &table,
                        context_len: len,
                    };
                    for (i, cpu) in cpus().enumerate() {
                        for threads in [1, 4] {
                            let exec = Threads(threads);
                            let cpu = Cpu { exec: &exec, isa: cpu.isa };
                            let params = geometry.params();
                            let (mut got, lse) =
                                layer.decode(&cpu, &params, &queries[..queries.len() / 3], &rows);
                            got.extend(lse);
                            let mut out = vec![f32::NAN; queries.len()];
                            cpu.prefill(layer.pages(), &params, &chunk, &mut out).unwrap();
                            got.extend(out);
                            assert!(got.iter().all(|x| x.is_finite()), "{name} {len} {fill:?}");
                            match results.get(i) {
                                None => results.push(got),
                                Some(first) => {
                                    assert_same_bits(&format!("{name} {len} {fill:?}"), &got, first)
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Pages before the window may be gone.
#[test]
fn entries_before_the_window_do_not_matter() {
    let geometry = Geometry::new(64, 2, 2, 16);
    for (name, format) in formats() {
        let mut layer = Layer::new(format, geometry, 60, 5);
        let sequence = layer.sequence(700);
        let (queries, (keys, values)) = (layer.queries(4), layer.rows(4));
        let params = AttentionParams { window: Some(100), ..geometry.params() };
        // Position 699 sees 600..=699; the prefill's first token, 700, sees 601..=700.
        let mut cut = sequence.block_table.clone();
        cut[..600 / 16].fill(-1);
        for cpu in cpus() {
            let outputs: Vec<Vec<f32>> = [&sequence.block_table, &cut]
                .into_iter()
                .map(|table| {
                    let row = DecodeRow { block_table: table, seq_len: 700 };
                    let (mut got, _) = layer.decode(&cpu, &params, &queries[..queries.len() / 4], &[row]);
                    let chunk = PrefillChunk {
                        queries: &queries,
                        keys: &keys,
                        values: &values,
                        block_table: table,
                        context_len: 700,
                    };
                    let mut out = vec![f32::NAN; queries.len()];
                    cpu.prefill(layer.pages(), &params, &chunk, &mut out).unwrap();
                    got.extend(out);
                    got
                })
                .collect();
            assert_same_bits(&format!("{name} {}", cpu.isa.name()), &outputs[0], &outputs[1]);
        }
    }
}

/// A row alone, in a batch, in the reversed batch, on any number of threads: equal bits.
#[test]
fn rows_do_not_influence_each_other() {
    let geometry = Geometry::new(64, 1, 3, 16);
    for (name, format) in formats() {
        let mut layer = Layer::new(format, geometry, 320, 6);
        // More splits than one round of partial states holds.
        let lens = [1500, 3, 0, 512, 513, 1024, 64, 700];
        let sequences = lens.map(|len| layer.sequence(len));
        let queries = layer.queries(lens.len());
        let width = queries.len() / lens.len();
        let rows = sequences.each_ref().map(|s| s.row());
        let reversed_rows: Vec<_> = rows.iter().rev().copied().collect();
        let reversed_queries: Vec<f32> = queries.chunks_exact(width).rev().flatten().copied().collect();
        for cpu in cpus() {
            for (variant, params) in variants(&geometry, &SINKS).into_iter().step_by(3) {
                let (batch, _) = layer.decode(&cpu, &params, &queries, &rows);
                for threads in [1, 2, 5, 40] {
                    let place = format!("{name} {variant} {} {threads} threads", cpu.isa.name());
                    let exec = Threads(threads);
                    let cpu = Cpu { exec: &exec, isa: cpu.isa };
                    let (together, _) = layer.decode(&cpu, &params, &queries, &rows);
                    assert_same_bits(&place, &together, &batch);
                    let (reversed, _) = layer.decode(&cpu, &params, &reversed_queries, &reversed_rows);
                    let again: Vec<f32> = reversed.chunks_exact(width).rev().flatten().copied().collect();
                    assert_same_bits(&place, &again, &batch);
                    for (i, query) in queries.chunks_exact(width).enumerate() {
                        let (alone, _) = layer.decode(&cpu, &params, query, &rows[i..=i]);
                        assert_same_bits(&place, &alone, &batch[i * width..][..width]);
                    }
                }
            }
        }
    }
}

/// A batch whose longest query equals its longest context although all but one request continue a
/// cached prefix: nothing may conclude that there are no prefixes.
#[test]
fn mixed_batches_see_their_prefixes() {
    let geometry = Geometry::new(128, 2, 4, 16);
    let (query_lens, context_lens) = ([1000, 100, 1, 128, 129], [1000, 500, 801, 640, 641]);
    let mut layer = Layer::new(formats()[5].1, geometry, 240, 8);
    for (query_len, context_len) in query_lens.into_iter().zip(context_lens) {
        let sequence = layer.sequence(context_len - query_len);
        let (keys, values) = layer.rows(query_len);
        let queries = layer.queries(query_len);
        let mut dense = layer.dense(&sequence);
        let width = keys.len() / query_len;
        for (key, value) in keys.chunks_exact(width).zip(values.chunks_exact(width)) {
            dense.push(key, value);
        }
        let chunk = PrefillChunk {
            queries: &queries,
            keys: &keys,
            values: &values,
            block_table: &sequence.block_table,
            context_len: sequence.len,
        };
        let mut out = vec![f32::NAN; queries.len()];
        Cpu::new(&Rayon).prefill(layer.pages(), &geometry.params(), &chunk, &mut out).unwrap();
        let mut serial = vec![f32::NAN; queries.len()];
        Cpu::new(&Serial).prefill(layer.pages(), &geometry.params(), &chunk, &mut serial).unwrap();
        assert_same_bits("threads", &out, &serial);
        let last = queries.len() / query_len * (query_len - 1);
        let (expected, _) = dense.attend(&geometry.params(), &queries[last..], 0..context_len, 128);
        crate::compare::assert_close(
            &format!("{query_len} of {context_len}"),
            Isa::detect(),
            &out[last..],
            &expected,
            128,
        );
    }
}
