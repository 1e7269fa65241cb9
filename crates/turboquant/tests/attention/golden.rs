//! Decode outputs of vLLM's own kernels on the slots they wrote (testdata/README.md).

use safetensors::SafeTensors;
use turboquant::{
    attention::{AttentionParams, DecodeRow, Pages},
    format::{CacheDtype, NativeDtype, Preset},
    page::PageCodec,
    rows::RowCodec,
};

use crate::fixture::cpus;

fn i32s(tensors: &SafeTensors<'_>, name: &str) -> Vec<i32> {
    let data = tensors.tensor(name).unwrap().data().to_vec();
    data.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
}

#[test]
fn decode_of_vllms_slots_gives_vllms_outputs() {
    for head_dim in [64usize, 128, 256] {
        let path = format!("{}/testdata/vllm_slots_d{head_dim}.safetensors", env!("CARGO_MANIFEST_DIR"));
        let file = std::fs::read(path).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let queries: Vec<f32> = tensors
            .tensor("query")
            .unwrap()
            .data()
            .chunks_exact(2)
            .map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect();
        let (slot_mapping, tables) = (i32s(&tensors, "slot_mapping"), i32s(&tensors, "block_table"));
        let seq_lens = i32s(&tensors, "seq_lens");
        for preset in Preset::ALL {
            let dtype = CacheDtype::TurboQuant(preset);
            let rows = RowCodec::new(dtype.row_format(NativeDtype::Bf16), head_dim, head_dim).unwrap();
            let codec = PageCodec::new(rows, 2, 16).unwrap();
            // vLLM's cache: pages of [16, 2, slot_bytes].
            let num_pages = *tables.iter().max().unwrap() as usize + 1;
            let token_bytes = 2 * codec.rows().layout().slot_bytes;
            let mut cache = vec![0xFF; num_pages * codec.page_bytes()];
            let golden = tensors.tensor(&format!("{dtype}.slots")).unwrap();
            for (slot, token) in slot_mapping.iter().zip(golden.data().chunks_exact(token_bytes)) {
                cache[*slot as usize * token_bytes..][..token_bytes].copy_from_slice(token);
            }
            let mut slab = vec![0; cache.len()];
            for (ours, theirs) in
                slab.chunks_exact_mut(codec.page_bytes()).zip(cache.chunks_exact(codec.page_bytes()))
            {
                codec.slots_to_page(theirs, ours).unwrap();
            }
            let rows: Vec<_> = tables
                .chunks_exact(tables.len() / 3)
                .zip(&seq_lens)
                .map(|(block_table, len)| DecodeRow { block_table, seq_len: *len as usize })
                .collect();
            let expected = tensors.tensor(&format!("{dtype}.attention")).unwrap();
            let expected: Vec<f32> =
                expected.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            let params = AttentionParams::new(8, 1.0 / (head_dim as f32).sqrt());
            for cpu in cpus() {
                let mut out = vec![f32::NAN; expected.len()];
                let pages = Pages { codec: &codec, slab: &slab };
                cpu.decode(pages, &params, &queries, &rows, &mut out, None).unwrap();
                for (i, (got, want)) in out.iter().zip(&expected).enumerate() {
                    // bf16 keeps 8 bits: half a step is 2^-9 of the value; vLLM's own error comes on top.
                    let head = &expected[i / head_dim * head_dim..][..head_dim];
                    let rms = (head.iter().map(|x| x * x).sum::<f32>() / head_dim as f32).sqrt();
                    let bound = want.abs() / 256.0 + rms / 500.0;
                    let place = format!("{dtype} head_dim {head_dim} {}", cpu.isa.name());
                    assert!((got - want).abs() <= bound, "{place}: element {i} is {got}, vLLM's {want}");
                }
            }
        }
    }
}
