//! Malformed calls: one typed error each, and nothing written.

use turboquant::{
    attention::{AttentionError, AttentionParams, Cpu, DecodeRow, Pages, PagesMut, PrefillChunk},
    exec::Serial,
};

use crate::fixture::{Geometry, Layer, formats};

const GEOMETRY: Geometry = Geometry { value_head_dim: 24, ..Geometry::new(16, 2, 2, 16) };

fn layer() -> Layer {
    Layer::new(formats()[5].1, GEOMETRY, 4, 1)
}

#[test]
fn store() {
    let mut layer = layer();
    let before = layer.slab.clone();
    let cpu = Cpu::new(&Serial);
    let (keys, values) = layer.rows(2);
    let mut refuse = |keys: &[f32], values: &[f32], slots: &[i64]| {
        let pages = PagesMut { codec: &layer.codec, slab: &mut layer.slab };
        let error = cpu.store(pages, keys, values, slots).unwrap_err();
        assert!(layer.slab == before, "{error}: something was written");
        error
    };
    assert_eq!(refuse(&keys, &values, &[0, 64]), AttentionError::Slot { token: 1, got: 64, num_slots: 64 });
    assert_eq!(
        refuse(&keys, &values, &[i64::MAX, 0]),
        AttentionError::Slot { token: 0, got: i64::MAX, num_slots: 64 }
    );
    assert_eq!(
        refuse(&keys[1..], &values, &[0, 1]),
        AttentionError::Length { what: "keys", expected: 64, got: 63 }
    );
    assert_eq!(
        refuse(&keys, &values, &[0, 1, 2]),
        AttentionError::Length { what: "keys", expected: 96, got: 64 }
    );
    assert_eq!(
        refuse(&keys, &keys, &[0, 1]),
        AttentionError::Length { what: "values", expected: 96, got: 64 }
    );
    let cut = layer.slab.len() - 1;
    let pages = PagesMut { codec: &layer.codec, slab: &mut layer.slab[..cut] };
    let page_bytes = layer.codec.page_bytes();
    assert_eq!(
        cpu.store(pages, &keys, &values, &[0, 1]).unwrap_err(),
        AttentionError::Slab { page_bytes, got: 4 * page_bytes - 1 }
    );
}

#[test]
fn decode() {
    let mut layer = layer();
    let sequence = layer.sequence(20);
    let queries = layer.queries(1);
    let cpu = Cpu::new(&Serial);
    let plain = GEOMETRY.params();
    let refuse = |pages: Pages<'_>,
                  params: &AttentionParams<'_>,
                  queries: &[f32],
                  row: DecodeRow<'_>,
                  len: usize,
                  lse: usize| {
        let (mut out, mut lse) = (vec![7.0; len], vec![7.0; lse]);
        let error = cpu.decode(pages, params, queries, &[row], &mut out, Some(&mut lse)).unwrap_err();
        assert!(out.iter().chain(&lse).all(|x| *x == 7.0), "{error}: something was written");
        error
    };
    let (pages, row) = (layer.pages(), sequence.row());
    let with = |params: &AttentionParams<'_>| refuse(pages, params, &queries, row, 96, 4);
    for num_qo_heads in [0, 3] {
        let expected = AttentionError::Heads { num_qo_heads, num_kv_heads: 2 };
        assert_eq!(with(&AttentionParams { num_qo_heads, ..plain }), expected);
    }
    assert_eq!(
        with(&AttentionParams { window: Some(0), ..plain }),
        AttentionError::Parameter { what: "a window", got: 0.0 }
    );
    for cap in [0.0, -1.0, f32::INFINITY, f32::NAN] {
        let error = with(&AttentionParams { soft_cap: Some(cap), ..plain });
        assert!(matches!(error, AttentionError::Parameter { what: "a soft cap", .. }), "{error}");
    }
    let error = with(&AttentionParams { sm_scale: f32::NAN, ..plain });
    assert!(matches!(error, AttentionError::Parameter { what: "a softmax scale", .. }), "{error}");
    assert_eq!(
        with(&AttentionParams { sinks: Some(&[0.0; 3]), ..plain }),
        AttentionError::Length { what: "sinks", expected: 4, got: 3 }
    );
    for (queries, out, lse, what) in
        [(&queries[1..], 96, 4, "queries"), (&queries, 95, 4, "out"), (&queries, 96, 5, "lse")]
    {
        let error = refuse(pages, &plain, queries, row, out, lse);
        assert!(matches!(error, AttentionError::Length { what: w, .. } if w == what), "{error}");
    }
    let table = &sequence.block_table;
    assert_eq!(
        refuse(pages, &plain, &queries, DecodeRow { block_table: &table[..1], seq_len: 17 }, 96, 4),
        AttentionError::BlockTable { row: 0, tokens: 17, needed: 2, got: 1 }
    );
    let huge = refuse(pages, &plain, &queries, DecodeRow { block_table: table, seq_len: usize::MAX }, 96, 4);
    assert!(matches!(huge, AttentionError::BlockTable { .. }), "{huge}");
    for got in [-1, 4, i32::MAX, i32::MIN] {
        let table = [table[0], got];
        assert_eq!(
            refuse(pages, &plain, &queries, DecodeRow { block_table: &table, seq_len: 17 }, 96, 4),
            AttentionError::Page { row: 0, entry: 1, got, num_pages: 4 }
        );
    }
    let cut = Pages { slab: &layer.slab[1..], ..pages };
    let error = refuse(cut, &plain, &queries, row, 96, 4);
    assert!(matches!(error, AttentionError::Slab { .. }), "{error}");
}

#[test]
fn prefill() {
    let mut layer = layer();
    let sequence = layer.sequence(20);
    let (queries, (keys, values)) = (layer.queries(3), layer.rows(3));
    let whole = PrefillChunk {
        queries: &queries,
        keys: &keys,
        values: &values,
        block_table: &sequence.block_table,
        context_len: 20,
    };
    let cpu = Cpu::new(&Serial);
    let refuse = |chunk: PrefillChunk<'_>, len: usize| {
        let mut out = vec![7.0; len];
        let error = cpu.prefill(layer.pages(), &GEOMETRY.params(), &chunk, &mut out).unwrap_err();
        assert!(out.iter().all(|x| *x == 7.0), "{error}: something was written");
        error
    };
    let len = 3 * 4 * 24;
    for (chunk, len, what) in [
        (PrefillChunk { queries: &queries[1..], ..whole }, len, "queries"),
        (PrefillChunk { keys: &keys[1..], ..whole }, len, "keys"),
        (PrefillChunk { values: &keys, ..whole }, len, "values"),
        (whole, len - 1, "out"),
    ] {
        let error = refuse(chunk, len);
        assert!(matches!(error, AttentionError::Length { what: w, .. } if w == what), "{error}");
    }
    assert_eq!(
        refuse(PrefillChunk { block_table: &[0], ..whole }, len),
        AttentionError::BlockTable { row: 0, tokens: 20, needed: 2, got: 1 }
    );
    assert_eq!(
        refuse(PrefillChunk { block_table: &[0, -1], ..whole }, len),
        AttentionError::Page { row: 0, entry: 1, got: -1, num_pages: 4 }
    );
    let huge = refuse(PrefillChunk { context_len: usize::MAX - 1, ..whole }, len);
    assert!(matches!(huge, AttentionError::BlockTable { .. }), "{huge}");
    let nothing = PrefillChunk { queries: &[], keys: &[], values: &[], block_table: &[], context_len: 0 };
    cpu.prefill(layer.pages(), &GEOMETRY.params(), &nothing, &mut []).unwrap();
}
