//! Prefill over formats, widths, head groups, windows, caps, sinks, contexts and chunk lengths.

use turboquant::attention::{AttentionParams, Cpu, PrefillChunk};

use crate::{
    compare::{assert_close, assert_same_bits},
    decode::{GEOMETRIES, SINKS, variants},
    fixture::{Layer, Sequence, Threads, cpus, formats},
};

/// New tokens after a sequence.
struct Chunk {
    sequence: Sequence,
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Chunk {
    fn new(layer: &mut Layer, context: usize, tokens: usize) -> Chunk {
        let sequence = layer.sequence(context);
        let (keys, values) = layer.rows(tokens);
        Chunk { sequence, queries: layer.queries(tokens), keys, values }
    }

    /// The first `tokens` of `of`.
    fn part(&self, tokens: usize, of: usize) -> PrefillChunk<'_> {
        PrefillChunk {
            queries: &self.queries[..self.queries.len() / of * tokens],
            keys: &self.keys[..self.keys.len() / of * tokens],
            values: &self.values[..self.values.len() / of * tokens],
            block_table: &self.sequence.block_table,
            context_len: self.sequence.len,
        }
    }
}

fn run(layer: &Layer, cpu: &Cpu<'_>, params: &AttentionParams<'_>, chunk: &PrefillChunk<'_>) -> Vec<f32> {
    let heads = chunk.queries.len() / layer.geometry.key_head_dim;
    let mut out = vec![f32::NAN; heads * layer.geometry.value_head_dim];
    cpu.prefill(layer.pages(), params, chunk, &mut out).unwrap();
    out
}

#[test]
fn equals_the_oracle() {
    for (g, geometry) in GEOMETRIES.into_iter().enumerate() {
        for (name, format) in formats() {
            let mut layer = Layer::new(format, geometry, 50, g as u64);
            let cases = [(0, 1), (0, 23), (16, 5), (33, 70), (128, 9), (200, 130)];
            for (case, (context, tokens)) in cases.into_iter().enumerate() {
                // The large chunk once per geometry or format is enough.
                if tokens > 100 && g % formats().len() != formats().iter().position(|f| f.0 == name).unwrap()
                {
                    continue;
                }
                let chunk = Chunk::new(&mut layer, context, tokens);
                let mut dense = layer.dense(&chunk.sequence);
                let (key_width, value_width) = (chunk.keys.len() / tokens, chunk.values.len() / tokens);
                for (key, value) in
                    chunk.keys.chunks_exact(key_width).zip(chunk.values.chunks_exact(value_width))
                {
                    dense.push(key, value);
                }
                // A third of the variants, another third for the next geometry and the next case.
                for (variant, params) in
                    variants(&geometry, &SINKS).into_iter().skip((g + case) % 3).step_by(3)
                {
                    let query_width = chunk.queries.len() / tokens;
                    let mut expected = Vec::new();
                    for (i, query) in chunk.queries.chunks_exact(query_width).enumerate() {
                        let end = context + i + 1;
                        let first = params.window.map_or(0, |window| end.saturating_sub(window));
                        expected.extend(dense.attend(&params, query, first..end, geometry.value_head_dim).0);
                    }
                    for cpu in cpus() {
                        let got = run(&layer, &cpu, &params, &chunk.part(tokens, tokens));
                        let isa = cpu.isa.name();
                        let place = format!("{name} {geometry:?} {context}+{tokens} {variant} {isa}");
                        let error = assert_close(&place, cpu.isa, &got, &expected, geometry.value_head_dim);
                        if std::env::var_os("PRINT_ERRORS").is_some() {
                            println!("{error:.1e} {place}");
                        }
                    }
                }
            }
        }
    }
}

/// A token's result depends neither on later tokens of the chunk nor on the threads.
#[test]
fn a_chunk_may_end_anywhere() {
    let geometry = GEOMETRIES[1];
    for (name, format) in formats() {
        let mut layer = Layer::new(format, geometry, 50, 3);
        let chunk = Chunk::new(&mut layer, 160, 201);
        for cpu in cpus() {
            for (variant, params) in variants(&geometry, &SINKS).into_iter().step_by(2) {
                let whole = run(&layer, &cpu, &params, &chunk.part(201, 201));
                for (tokens, threads) in [(1, 3), (7, 16), (64, 1), (150, 5)] {
                    let exec = Threads(threads);
                    let cpu = Cpu { exec: &exec, isa: cpu.isa };
                    let part = run(&layer, &cpu, &params, &chunk.part(tokens, 201));
                    let place =
                        format!("{name} {variant} {} {tokens} tokens, {threads} threads", cpu.isa.name());
                    assert_same_bits(&place, &part, &whole[..part.len()]);
                }
            }
        }
    }
}

/// A NaN in a later token's raw value or in a row that fell out of the window stays where it is seen.
#[test]
fn unseen_values_may_be_nan() {
    let geometry = GEOMETRIES[1];
    for (name, format) in formats() {
        let mut layer = Layer::new(format, geometry, 50, 4);
        let (mut keys, mut values) = layer.rows(100);
        let width = values.len() / 100;
        (values[70 * width + 3], keys[70 * width + 5]) = (f32::NAN, f32::INFINITY);
        let mut chunk = Chunk::new(&mut layer, 0, 40);
        layer.append(&mut chunk.sequence, &keys, &values);
        chunk.values[20 * width] = f32::NAN;
        chunk.keys[20 * width] = f32::NAN;
        let params = AttentionParams { window: Some(32), ..geometry.params() };
        for cpu in cpus() {
            let out = run(&layer, &cpu, &params, &chunk.part(40, 40));
            let finite: Vec<bool> =
                out.chunks(out.len() / 40).map(|row| row.iter().all(|x| x.is_finite())).collect();
            // Position 100 + i sees 69 + i..=100 + i: token 70 up to i = 1, token 120 from i = 20 on.
            let expected: Vec<bool> = (0..40).map(|i| (2..20).contains(&i)).collect();
            assert_eq!(finite, expected, "{name} {}", cpu.isa.name());
        }
    }
}
