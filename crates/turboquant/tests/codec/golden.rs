//! Slots against the bytes that vLLM's own kernels wrote (testdata/README.md).

use half::bf16;
use safetensors::SafeTensors;
use turboquant::{
    codebook::Codebook,
    format::{CacheDtype, KeyFormat, NativeDtype, Preset, ValueFormat},
    rows::{EncodeReport, Isa, RowCodec, unpack_codes},
};

const HEADS: usize = 2;
const TOKENS: usize = 83;

fn file(head_dim: usize) -> Vec<u8> {
    let path = format!("{}/testdata/vllm_slots_d{head_dim}.safetensors", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(path).unwrap()
}

fn bf16s(tensors: &SafeTensors, name: &str) -> Vec<bf16> {
    let data = tensors.tensor(name).unwrap();
    data.data().chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]])).collect()
}

fn f32s(tensors: &SafeTensors, name: &str) -> Vec<f32> {
    let data = tensors.tensor(name).unwrap();
    data.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn i32s(tensors: &SafeTensors, name: &str) -> Vec<i32> {
    let data = tensors.tensor(name).unwrap();
    data.data().chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn value_codes(codec: &RowCodec, slot: &[u8]) -> Vec<u8> {
    let ValueFormat::Uniform { bits } = codec.format().value else { panic!("a preset's values are uniform") };
    let mut codes = vec![0; codec.value_head_dim()];
    unpack_codes(Isa::Scalar, bits, &slot[codec.layout().value_codes.clone()], &mut codes);
    codes
}

#[test]
fn slots_equal_vllm_but_for_rounding_ties_of_values() {
    for head_dim in [64, 128, 256] {
        let file = file(head_dim);
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let (keys, values) = (bf16s(&tensors, "key"), bf16s(&tensors, "value"));
        for preset in Preset::ALL {
            let dtype = CacheDtype::TurboQuant(preset);
            let codec = RowCodec::new(dtype.row_format(NativeDtype::Bf16), head_dim, head_dim).unwrap();
            let layout = codec.layout();
            let golden = tensors.tensor(&format!("{dtype}.slots")).unwrap();
            assert_eq!(golden.shape(), [TOKENS, HEADS, layout.slot_bytes]);
            for isa in Isa::available() {
                let (mut differing, mut report) = (0, EncodeReport::default());
                for (row, golden) in golden.data().chunks_exact(layout.slot_bytes).enumerate() {
                    let at = row * head_dim..(row + 1) * head_dim;
                    let (key, value) = (&keys[at.clone()], &values[at]);
                    let mut slot = vec![0; layout.slot_bytes];
                    codec.encode_slot(isa, key, value, &mut slot, &mut report);
                    let place = format!("{dtype} head_dim {head_dim} row {row} {}", isa.name());
                    let key_row = ..layout.key_row_bytes;
                    assert_eq!(slot[key_row], golden[key_row], "key row: {place}");
                    let fields = layout.value_codes.end..layout.key_row_bytes + layout.value_row_bytes;
                    assert_eq!(slot[fields.clone()], golden[fields], "scale and minimum: {place}");
                    let pairs = value_codes(&codec, &slot).into_iter().zip(value_codes(&codec, golden));
                    for (i, (ours, theirs)) in pairs.enumerate().filter(|(_, (a, b))| a != b) {
                        differing += 1;
                        assert!(is_tie(value, i, ours, theirs, &codec), "no tie: {place} element {i}");
                    }
                }
                let share = f64::from(differing) / (TOKENS * HEADS * head_dim) as f64;
                assert!(share <= 0.002, "{dtype} head_dim {head_dim}: {share} of the value codes differ");
                println!(
                    "{dtype} head_dim {head_dim} {}: {:.3} % of value codes differ",
                    isa.name(),
                    share * 100.0
                );
            }
        }
    }
}

/// Whether element `i` lies within a few f32 ulp of the border between two neighbouring codes.
fn is_tie(value: &[bf16], i: usize, ours: u8, theirs: u8, codec: &RowCodec) -> bool {
    let ValueFormat::Uniform { bits } = codec.format().value else { return false };
    let value: Vec<f64> = value.iter().map(|v| v.to_f64()).collect();
    let low = value.iter().copied().fold(f64::INFINITY, f64::min);
    let high = value.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let position = (value[i] - low) / ((high - low) / f64::from((1 << bits) - 1));
    let border = f64::from(ours.max(theirs)) - 0.5;
    ours.abs_diff(theirs) == 1
        && (position - border).abs() < 8.0 * f64::from(f32::EPSILON) * position.max(1.0)
}

#[test]
fn centroids_equal_vllm() {
    for head_dim in [64, 128, 256] {
        let file = file(head_dim);
        let tensors = SafeTensors::deserialize(&file).unwrap();
        for preset in Preset::ALL {
            let dtype = CacheDtype::TurboQuant(preset);
            let KeyFormat::LloydMax { bits } = dtype.row_format(NativeDtype::Bf16).key else { continue };
            let golden = f32s(&tensors, &format!("{dtype}.centroids"));
            assert_eq!(Codebook::shared(head_dim, bits).centroids(), golden, "{dtype} head_dim {head_dim}");
        }
    }
}

/// Decode attention of vLLM over its own slots: fixes the meaning of the fp16 fields, the norm
/// correction and the rotation on the reading side.
#[test]
fn attention_over_decoded_slots_equals_vllm() {
    const QUERY_HEADS: usize = 8;
    for head_dim in [64, 128, 256] {
        let file = file(head_dim);
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let queries: Vec<f32> = bf16s(&tensors, "query").into_iter().map(f32::from).collect();
        let seq_lens: Vec<usize> = i32s(&tensors, "seq_lens").into_iter().map(|n| n as usize).collect();
        for (preset, isa) in
            Preset::ALL.into_iter().flat_map(|p| Isa::available().into_iter().map(move |isa| (p, isa)))
        {
            let dtype = CacheDtype::TurboQuant(preset);
            let codec = RowCodec::new(dtype.row_format(NativeDtype::Bf16), head_dim, head_dim).unwrap();
            let slots = tensors.tensor(&format!("{dtype}.slots")).unwrap();
            let golden = f32s(&tensors, &format!("{dtype}.attention"));
            let mut worst: f64 = 0.0;
            for (at, query) in queries.chunks_exact(head_dim).enumerate() {
                let (sequence, head) = (at / QUERY_HEADS, at % QUERY_HEADS / (QUERY_HEADS / HEADS));
                let mut query = query.to_vec();
                codec.rotate_query(isa, &mut query);
                let (mut key, mut value) = (vec![0.0; head_dim], vec![0.0; head_dim]);
                let (mut sum, mut out) = (0.0, vec![0.0; head_dim]);
                // Scores of these inputs stay far below exp's range.
                for token in 0..seq_lens[sequence] {
                    let row = token * HEADS + head;
                    let slot = &slots.data()[row * codec.layout().slot_bytes..][..codec.layout().slot_bytes];
                    codec.decode_key(isa, slot, &mut key);
                    codec.decode_value(isa, slot, &mut value);
                    let score: f64 = query.iter().zip(&key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                    let weight = (score / (head_dim as f64).sqrt()).exp();
                    assert!(weight.is_finite());
                    sum += weight;
                    out.iter_mut().zip(&value).for_each(|(o, v)| *o += weight * f64::from(*v));
                }
                let golden = &golden[at * head_dim..][..head_dim];
                let peak = golden.iter().fold(0f32, |peak, g| peak.max(g.abs()));
                for (o, g) in out.iter().zip(golden) {
                    worst = worst.max((o / sum - f64::from(*g)).abs() / f64::from(peak));
                }
            }
            println!("{dtype} head_dim {head_dim} {}: worst error {worst:.5} of the peak", isa.name());
            // bf16 output alone is up to 2^-9 of an element.
            assert!(worst < 0.005, "{dtype} head_dim {head_dim} {}: {worst}", isa.name());
        }
    }
}
