//! Order of bytes in a page: sizes, addresses, the converter, the store.

use turboquant::{
    attention::{Cpu, PagesMut},
    exec::{Rayon, Serial},
    layout::head_dims,
    page::{PageCodec, PageError},
    rows::{EncodeReport, Isa, RowCodec},
};

use crate::fixture::{Geometry, Layer, Random, formats};

/// Any bytes, pads and NaN patterns included, survive both ways.
#[test]
fn the_converter_loses_nothing() {
    let mut random = Random::new(1);
    for (name, format) in formats() {
        for head_dim in head_dims() {
            let value_head_dim = if head_dim % 16 == 0 { head_dim } else { 592 - head_dim };
            let rows = RowCodec::new(format, head_dim, value_head_dim).unwrap();
            let codec = PageCodec::new(rows, 2, 32).unwrap();
            let slots: Vec<u8> = (0..codec.page_bytes()).map(|_| random.bits() as u8).collect();
            let (mut page, mut back) = (vec![0; slots.len()], vec![0; slots.len()]);
            codec.slots_to_page(&slots, &mut page).unwrap();
            codec.page_to_slots(&page, &mut back).unwrap();
            assert!(slots == back, "{name} {head_dim}: slots -> page -> slots");
            codec.page_to_slots(&slots, &mut back).unwrap();
            codec.slots_to_page(&back, &mut page).unwrap();
            assert!(slots == page, "{name} {head_dim}: page -> slots -> page");
        }
    }
}

/// What the store writes is what the codec writes into a slot, and nothing else changes.
#[test]
fn the_store_writes_the_codecs_bytes_and_no_others() {
    for (name, format) in formats() {
        for geometry in
            [Geometry::new(72, 3, 1, 32), Geometry { value_head_dim: 24, ..Geometry::new(40, 2, 1, 16) }]
        {
            let mut layer = Layer::new(format, geometry, 9, 2);
            let (keys, values) = layer.rows(70);
            let page_size = geometry.page_size as i64;
            // Pages in any order, gaps, skipped tokens, one slot twice (the later token stays).
            let mut slots: Vec<i64> = (0..70).map(|i| (i * 37 + 11) % (9 * page_size)).collect();
            (slots[4], slots[9], slots[20]) = (-1, slots[60], -7);
            let mut by_slot = std::collections::BTreeMap::new();
            for (token, slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                by_slot.insert(*slot as usize, token);
            }
            for isa in Isa::available() {
                let mut slab = vec![0xA5; layer.slab.len()];
                let mut expected = EncodeReport::default();
                let pages = PagesMut { codec: &layer.codec, slab: &mut slab };
                let report = Cpu { exec: &Rayon, isa }.store(pages, &keys, &values, &slots).unwrap();
                let slot_bytes = layer.codec.rows().layout().slot_bytes;
                let pad = layer.codec.rows().layout().pad_bytes();
                let mut untouched = vec![0; layer.codec.page_bytes()];
                layer.codec.page_to_slots(&vec![0xA5; untouched.len()], &mut untouched).unwrap();
                for (page, bytes) in slab.chunks_exact(layer.codec.page_bytes()).enumerate() {
                    let mut got = vec![0; bytes.len()];
                    layer.codec.page_to_slots(bytes, &mut got).unwrap();
                    let by_token = slot_bytes * geometry.num_kv_heads;
                    for (offset, got) in got.chunks_exact(by_token).enumerate() {
                        let token = by_slot.get(&(page * geometry.page_size + offset));
                        for (head, got) in got.chunks_exact(slot_bytes).enumerate() {
                            let mut slot =
                                untouched[offset * by_token + head * slot_bytes..][..slot_bytes].to_vec();
                            if let Some(token) = token {
                                let row = token * geometry.num_kv_heads + head;
                                let (k, v) = (geometry.key_head_dim, geometry.value_head_dim);
                                let (key, value) = (&keys[row * k..][..k], &values[row * v..][..v]);
                                let rows = layer.codec.rows();
                                rows.encode_slot(Isa::Scalar, key, value, &mut slot, &mut expected);
                            }
                            let end = slot_bytes - pad;
                            assert_eq!(
                                got[..end],
                                slot[..end],
                                "{name} page {page} token {offset} head {head}"
                            );
                        }
                    }
                }
                // The token that was overwritten was encoded too; random rows give up nothing.
                assert_eq!(report, expected, "{name}");
            }
        }
    }
}

#[test]
fn the_store_reports_what_was_given_up() {
    let layer = Layer::new(formats()[3].1, Geometry::new(16, 2, 1, 16), 8, 2);
    let (mut keys, values) = (vec![1.0f32; 100 * 32], vec![1.0f32; 100 * 32]);
    (keys[0], keys[32 * 50 + 1], keys[32 * 99]) = (449.0, -1e9, f32::NAN);
    for exec in [&Serial as &dyn turboquant::exec::Executor, &Rayon] {
        let mut slab = layer.slab.clone();
        let pages = PagesMut { codec: &layer.codec, slab: &mut slab };
        let slots: Vec<i64> = (0..100).collect();
        let report = Cpu::new(exec).store(pages, &keys, &values, &slots).unwrap();
        assert_eq!(report, EncodeReport { fp8_clipped: 2, non_finite: 1, ..EncodeReport::default() });
    }
}

/// Page ids whose byte offsets need more than 31 and more than 32 bits.
#[test]
fn offsets_are_64_bit() {
    let four_bit = formats()[5].1;
    let codec = PageCodec::new(RowCodec::new(four_bit, 128, 128).unwrap(), 8, 16).unwrap();
    assert_eq!(codec.page_bytes(), 17152);
    assert_eq!(codec.page_offset(125_203), 2_147_481_856);
    assert_eq!(codec.page_offset(125_204), 2_147_499_008);
    assert_eq!(codec.page_offset(250_407), 4_294_980_864);
    assert_eq!(codec.page_offset(u32::MAX), 17152 * u64::from(u32::MAX));
    assert_eq!(codec.tile_offset(250_407, 7, 15), 4_294_980_864 + 7 * 16 * 134);
    let native = PageCodec::new(RowCodec::new(formats()[2].1, 128, 128).unwrap(), 8, 512).unwrap();
    assert_eq!(native.page_bytes(), 2_097_152);
    assert_eq!(native.page_offset(1024), 2_147_483_648);
    assert_eq!(native.page_offset(2048), 1 << 32);
    assert_eq!(native.tile_offset(2048, 1, 17), (1 << 32) + (32 + 1) * 16 * 512);
}

#[test]
fn page_shapes_are_checked() {
    let rows = || RowCodec::new(formats()[5].1, 64, 64).unwrap();
    for got in [0, 1, 8, 24, 100] {
        assert_eq!(PageCodec::new(rows(), 2, got).unwrap_err(), PageError::PageSize { got });
    }
    assert_eq!(PageCodec::new(rows(), 0, 16).unwrap_err(), PageError::NoKvHeads);
    let error = PageCodec::new(rows(), usize::MAX / 2, 16).unwrap_err();
    assert!(matches!(error, PageError::TooLarge { .. }), "{error}");
    let codec = PageCodec::new(rows(), 1, 16).unwrap();
    let (mut short, mut page) = (vec![0; 1119], vec![0; 1120]);
    assert_eq!(
        codec.page_to_slots(&page, &mut short).unwrap_err(),
        PageError::Length { what: "slots", expected: 1120, got: 1119 }
    );
    assert_eq!(
        codec.slots_to_page(&page.clone(), &mut short).unwrap_err(),
        PageError::Length { what: "page", expected: 1120, got: 1119 }
    );
    codec.slots_to_page(&[1; 1120], &mut page).unwrap();
}
