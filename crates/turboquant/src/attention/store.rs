//! Store: new keys and values into their slots.

use std::sync::{Mutex, PoisonError};

use super::{AttentionError, Cpu, PagesMut, check_length, num_pages, work::for_each_unit};
use crate::{
    exec::Serial,
    page::{MAX_ROW_CODES, PageCodec, tile::TILE_TOKENS},
    rows::{Element, EncodeReport, Isa},
};

/// Rows below which waking other threads costs more than it saves.
const SERIAL_ROWS: usize = 64;

/// A token and its place in a page.
#[derive(Debug, Clone, Copy)]
struct Placed {
    page: usize,
    token_of_page: usize,
    token: usize,
}

/// One KV head of one page, and the tokens that go there.
struct Unit<'a> {
    head: usize,
    /// `[page_size / 16]` tiles
    tiles: &'a mut [u8],
    tokens: &'a [Placed],
}

impl Cpu<'_> {
    /// Encodes keys `[num_tokens, num_kv_heads, key_head_dim]` and values `[num_tokens, num_kv_heads,
    /// value_head_dim]` into the slots `slot_mapping[token] = page * page_size + offset`; -1 (any
    /// negative slot) stores nothing. Of two tokens for one slot the later stays. Returns what the
    /// encoder had to give up.
    ///
    /// # Errors
    /// Lengths that do not fit, and slots outside the slab.
    pub fn store<K: Element, V: Element>(
        &self,
        pages: PagesMut<'_>,
        keys: &[K],
        values: &[V],
        slot_mapping: &[i64],
    ) -> Result<EncodeReport, AttentionError> {
        let PagesMut { codec, slab } = pages;
        let (heads, page_size) = (codec.num_kv_heads(), codec.page_size());
        check_length("keys", slot_mapping.len() * heads * codec.rows().key_head_dim(), keys.len())?;
        check_length("values", slot_mapping.len() * heads * codec.rows().value_head_dim(), values.len())?;
        let num_slots = num_pages(codec, slab)? * page_size;
        let mut placed = Vec::with_capacity(slot_mapping.len());
        for (token, &got) in slot_mapping.iter().enumerate() {
            match usize::try_from(got) {
                Err(_) => {}
                Ok(slot) if slot < num_slots => {
                    placed.push(Placed { page: slot / page_size, token_of_page: slot % page_size, token });
                }
                Ok(_) => return Err(AttentionError::Slot { token, got, num_slots }),
            }
        }
        placed.sort_by_key(|placed| placed.page);

        let mut units = Vec::new();
        let (mut rest, mut first_page) = (slab, 0);
        for tokens in placed.chunk_by(|a, b| a.page == b.page) {
            let skipped = (tokens[0].page - first_page) * codec.page_bytes();
            let (page, after) = rest[skipped..].split_at_mut(codec.page_bytes());
            (rest, first_page) = (after, tokens[0].page + 1);
            let heads = page.chunks_exact_mut(codec.page_bytes() / heads).enumerate();
            units.extend(heads.map(|(head, tiles)| Unit { head, tiles, tokens }));
        }
        let total = Mutex::new(EncodeReport::default());
        let exec = if placed.len() * heads < SERIAL_ROWS { &Serial } else { self.exec };
        for_each_unit(
            exec,
            units.into_iter(),
            || [0; MAX_ROW_CODES],
            |codes, unit| {
                let report = store_unit(self.isa, codec, keys, values, codes, unit);
                *total.lock().unwrap_or_else(PoisonError::into_inner) += report;
            },
        );
        Ok(total.into_inner().unwrap_or_else(PoisonError::into_inner))
    }
}

fn store_unit<K: Element, V: Element>(
    isa: Isa,
    codec: &PageCodec,
    keys: &[K],
    values: &[V],
    codes: &mut [u8; MAX_ROW_CODES],
    unit: Unit<'_>,
) -> EncodeReport {
    let rows = codec.rows();
    let (key_width, value_width) = (rows.key_head_dim(), rows.value_head_dim());
    let mut report = EncodeReport::default();
    for placed in unit.tokens {
        let row = placed.token * codec.num_kv_heads() + unit.head;
        let tile = placed.token_of_page / TILE_TOKENS * codec.tile().bytes();
        let tile = &mut unit.tiles[tile..tile + codec.tile().bytes()];
        let token = placed.token_of_page % TILE_TOKENS;
        let key_codes = &mut codes[..rows.key_codes_len()];
        let meta = rows.encode_key(isa, &keys[row * key_width..][..key_width], key_codes, &mut report);
        codec.put_key(tile, token, key_codes, meta);
        let value_codes = &mut codes[..rows.value_codes_len()];
        let meta =
            rows.encode_value(isa, &values[row * value_width..][..value_width], value_codes, &mut report);
        codec.put_value(tile, token, value_codes, meta);
    }
    report
}
