//! Rows and queries at the ends of their ranges: sums of words must not overflow, NaN must show where
//! it is seen and only there.

use half::f16;
use turboquant::attention::{AttentionParams, DecodeRow};

use crate::{
    compare::assert_close,
    fixture::{Geometry, Layer, Random, cpus, formats},
};

/// Rows that no encoder writes: all codes alike, random codes, fields of any size.
#[test]
fn any_finite_slot_decodes_as_the_oracle_does() {
    let mut random = Random::new(11);
    for head_dim in [16, 64, 128, 576] {
        let geometry = Geometry::new(head_dim, 1, 5, 16);
        for (name, format) in formats().into_iter().skip(3) {
            let mut layer = Layer::new(format, geometry, 9, 1);
            let sequence = layer.sequence(140);
            let layout = layer.codec.rows().layout().clone();
            let mut slots = vec![0; layer.codec.page_bytes()];
            for page in layer.slab.chunks_exact_mut(layer.codec.page_bytes()) {
                layer.codec.page_to_slots(page, &mut slots).unwrap();
                for (i, slot) in slots.chunks_exact_mut(layout.slot_bytes).enumerate() {
                    let fields = [layout.norm, layout.scale, layout.zero];
                    for byte in &mut *slot {
                        // e4m3 has NaN at 0x7F and 0xFF.
                        *byte = match i % 4 {
                            0 => {
                                if name.contains("8") {
                                    0xFD
                                } else {
                                    0xFF
                                }
                            }
                            1 => 0x00,
                            2 => 0x5A,
                            _ => random.bits() as u8 & 0xBF,
                        };
                    }
                    for at in fields.into_iter().flatten() {
                        let field = [0.0, 3e-7, 1.0, -2.5, 0.75][(random.bits() % 5) as usize];
                        slot[at..at + 2].copy_from_slice(&f16::from_f32(field).to_le_bytes());
                    }
                }
                layer.codec.slots_to_page(&slots, page).unwrap();
            }
            let dense = layer.dense(&sequence);
            // A query along the first axis has equal elements once rotated (opposite for -1): with
            // equal codes every product has the same sign.
            let axis = |x: f32| [&[x][..], &vec![0.0; head_dim - 1]].concat();
            let queries =
                [axis(1.0), axis(-1.0), vec![1.0; head_dim], vec![0.0; head_dim], random.normals(head_dim)]
                    .concat();
            for size in [1.0, 1e30, 1e-30] {
                let queries: Vec<f32> = queries.iter().map(|q| q * size).collect();
                let params = AttentionParams { sm_scale: 0.01 / size, ..geometry.params() };
                let (expected, _) = dense.attend(&params, &queries, 0..140, head_dim);
                for cpu in cpus() {
                    let (got, _) = layer.decode(&cpu, &params, &queries, &[sequence.row()]);
                    let place = format!("{name} {head_dim} queries of {size:e} {}", cpu.isa.name());
                    assert_close(&place, cpu.isa, &got, &expected, head_dim);
                }
            }
        }
    }
}

#[test]
fn a_nan_in_a_query_shows_in_its_head_alone() {
    let geometry = Geometry::new(64, 2, 3, 16);
    for (name, format) in formats() {
        let mut layer = Layer::new(format, geometry, 9, 1);
        let sequence = layer.sequence(70);
        let mut queries = layer.queries(1);
        queries[4 * 64 + 7] = f32::NAN;
        for cpu in cpus() {
            let (out, lse) = layer.decode(&cpu, &geometry.params(), &queries, &[sequence.row()]);
            for head in 0..6 {
                let nan = head == 4;
                let place = format!("{name} {} head {head}", cpu.isa.name());
                assert!(out[head * 64..][..64].iter().all(|x| x.is_nan() == nan), "{place}");
                assert!(lse[head].is_nan() == nan, "{place}");
            }
        }
    }
}

#[test]
fn a_nan_in_a_row_shows_to_those_who_see_it() {
    let geometry = Geometry::new(64, 1, 3, 16);
    for (name, format) in formats() {
        for in_value in [false, true] {
            let mut layer = Layer::new(format, geometry, 9, 1);
            let mut sequence = layer.sequence(50);
            let (mut keys, mut values) = layer.rows(90);
            if in_value {
                values[20 * 64 + 1] = f32::NAN
            } else {
                keys[20 * 64 + 1] = f32::NAN
            }
            layer.append(&mut sequence, &keys, &values);
            let queries = layer.queries(4);
            let params = AttentionParams { window: Some(40), ..geometry.params() };
            // Token 70 is seen by the queries at positions 70..=109.
            let rows =
                [70, 71, 110, 111].map(|seq_len| DecodeRow { block_table: &sequence.block_table, seq_len });
            for cpu in cpus() {
                let (out, _) = layer.decode(&cpu, &params, &queries, &rows);
                let finite: Vec<bool> =
                    out.chunks(3 * 64).map(|row| row.iter().all(|x| x.is_finite())).collect();
                assert_eq!(finite, [true, false, false, true], "{name} {} {in_value}", cpu.isa.name());
            }
        }
    }
}
