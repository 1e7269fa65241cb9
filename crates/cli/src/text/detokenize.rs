//! Token ids back to text, one token at a time: a table of the bytes each token stands for, and an
//! assembler that lets a character out once all of its bytes are there.

use anyhow::{Result, bail};
use serde_json::Value;
use tokenizers::Tokenizer;

/// The bytes every token id stands for. Concatenated over a sequence they are its text, so nothing
/// has to be decoded twice and no leading space is lost.
pub(crate) struct TokenBytes {
    /// `[vocab + 1]`, ends of the tokens' bytes in `bytes`.
    ends: Vec<u32>,
    bytes: Vec<u8>,
    special: Vec<bool>,
}

impl TokenBytes {
    /// Reads the vocabulary of `tokenizer`; its decoder says how a token's name maps to bytes.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Result<Self> {
        let spelling = Spelling::of(tokenizer)?;
        let vocab = tokenizer.get_vocab(true);
        let added = tokenizer.get_added_tokens_decoder();
        let len = vocab.values().max().map_or(0, |&id| id as usize + 1);
        let mut names: Vec<Option<&str>> = vec![None; len];
        for (name, &id) in &vocab {
            names[id as usize] = Some(name);
        }
        let tokens = (0u32..).zip(names).map(|(id, name)| match added.get(&id) {
            Some(token) if token.special => Some((token.content.as_str(), TokenKind::Special)),
            Some(token) => Some((token.content.as_str(), TokenKind::Added)),
            None => name.map(|name| (name, TokenKind::Learned)),
        });
        Ok(Self::spelled(&spelling, tokens))
    }

    /// Of the tokens in the order of their ids: names and kinds. Where there is none an id is unused.
    pub(crate) fn spelled<'a>(
        spelling: &Spelling,
        tokens: impl Iterator<Item = Option<(&'a str, TokenKind)>>,
    ) -> Self {
        let mut table = TokenBytes { ends: Vec::new(), bytes: Vec::new(), special: Vec::new() };
        for token in tokens {
            match token {
                Some((name, TokenKind::Learned)) => spelling.append_bytes(name, &mut table.bytes),
                Some((name, TokenKind::Added)) => spelling.append_text(name, &mut table.bytes),
                Some((name, TokenKind::Special)) => table.bytes.extend_from_slice(name.as_bytes()),
                None => {}
            }
            table.special.push(token.is_some_and(|(_, kind)| kind == TokenKind::Special));
            table.ends.push(table.bytes.len() as u32);
        }
        table
    }

    /// A vocabulary without tokens.
    #[cfg(test)]
    pub(crate) fn empty() -> Self {
        TokenBytes { ends: Vec::new(), bytes: Vec::new(), special: Vec::new() }
    }

    /// Bytes of `id`; empty for an id the tokenizer does not know (padding of the embedding).
    pub(crate) fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// Bytes of `id` in visible text: special tokens have none.
    pub(crate) fn visible(&self, id: u32) -> &[u8] {
        if self.special.get(id as usize).copied().unwrap_or(true) { &[] } else { self.bytes(id) }
    }

    /// Length of the longest token.
    pub(crate) fn longest(&self) -> usize {
        (0..self.ends.len() as u32).map(|id| self.bytes(id).len()).max().unwrap_or(0)
    }

    /// The text of `ids`, special tokens left out.
    pub(crate) fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.visible(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Where a token comes from, which decides how its name is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// From the training text: bytes as the vocabulary spells them.
    Learned,
    /// Put there by hand: text, in which only spaces may be spelled.
    Added,
    /// Put there by hand for the model alone: never visible.
    Special,
}

/// How token names spell bytes.
pub(crate) enum Spelling {
    /// GPT-2's printable stand-ins, indexed by code point.
    ByteLevel(Vec<Option<u8>>),
    /// U+2581 for a space, `<0xNN>` for a byte.
    SentencePiece,
}

impl Spelling {
    /// GPT-2's.
    pub(crate) fn byte_level() -> Self {
        Self::ByteLevel(byte_level_table())
    }

    fn of(tokenizer: &Tokenizer) -> Result<Self> {
        let decoder = serde_json::to_value(tokenizer.get_decoder())?;
        let mut types = Vec::new();
        collect_types(&decoder, &mut types);
        if types.iter().any(|t| t == "ByteLevel") {
            Ok(Self::byte_level())
        } else if types.iter().any(|t| t == "Metaspace" || t == "Replace") {
            Ok(Self::SentencePiece)
        } else {
            bail!(
                "the tokenizer's decoder is {}, but only byte-level and SentencePiece tokenizers are \
                 supported",
                if types.is_empty() { "missing".to_owned() } else { types.join(" + ") }
            )
        }
    }

    fn append_bytes(&self, name: &str, out: &mut Vec<u8>) {
        match self {
            Self::ByteLevel(table) => {
                let mapped: Option<Vec<u8>> =
                    name.chars().map(|c| table.get(c as usize).copied().flatten()).collect();
                out.extend_from_slice(mapped.as_deref().unwrap_or(name.as_bytes()));
            }
            Self::SentencePiece => {
                let byte = name
                    .strip_prefix("<0x")
                    .and_then(|rest| rest.strip_suffix('>'))
                    .filter(|hex| hex.len() == 2)
                    .and_then(|hex| u8::from_str_radix(hex, 16).ok());
                match byte {
                    Some(byte) => out.push(byte),
                    None => self.append_text(name, out),
                }
            }
        }
    }

    fn append_text(&self, text: &str, out: &mut Vec<u8>) {
        match self {
            Self::ByteLevel(_) => out.extend_from_slice(text.as_bytes()),
            Self::SentencePiece => out.extend_from_slice(text.replace('\u{2581}', " ").as_bytes()),
        }
    }
}

fn collect_types(decoder: &Value, out: &mut Vec<String>) {
    if let Some(kind) = decoder.get("type").and_then(Value::as_str)
        && kind != "Sequence"
    {
        out.push(kind.to_owned());
    }
    for part in decoder.get("decoders").and_then(Value::as_array).into_iter().flatten() {
        collect_types(part, out);
    }
}

/// Printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up, in order.
fn byte_level_table() -> Vec<Option<u8>> {
    let mut table = vec![None; 0x180];
    let mut next = 0x100;
    for byte in 0..=255u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable {
            byte as usize
        } else {
            next += 1;
            next - 1
        };
        table[code] = Some(byte);
    }
    table
}

/// Bytes in, whole characters out.
///
/// A sequence that can no longer become a character turns into one U+FFFD, as in
/// [`String::from_utf8_lossy`]; one that still can is kept back.
#[derive(Clone, Default)]
pub(crate) struct Utf8Assembler {
    /// At most three bytes of an unfinished character.
    pending: Vec<u8>,
}

impl Utf8Assembler {
    /// Adds `bytes` and appends what is complete to `text`.
    pub(crate) fn push(&mut self, bytes: &[u8], text: &mut String) {
        self.pending.extend_from_slice(bytes);
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = after;
                    let Some(bad) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[bad..];
                }
            }
        }
        self.pending = rest.to_vec();
    }

    /// Whether `byte` cannot belong to the character that is unfinished, if one is.
    fn ends_before(&self, byte: u8) -> bool {
        let mut bytes = self.pending.clone();
        bytes.push(byte);
        let broken = std::str::from_utf8(&bytes).is_err_and(|error| error.error_len().is_some());
        broken && !self.pending.is_empty()
    }

    /// The end of the stream: an unfinished character becomes one U+FFFD.
    pub(crate) fn finish(&mut self, text: &mut String) {
        if !std::mem::take(&mut self.pending).is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Where tokens stand in a text, counted in its characters.
#[derive(Clone, Default)]
pub(crate) struct TextPosition {
    utf8: Utf8Assembler,
    /// Whole characters so far.
    chars: usize,
}

impl TextPosition {
    /// Goes on behind `bytes`; returns the character that the first of them belongs to.
    pub(crate) fn advance(&mut self, bytes: &[u8]) -> usize {
        let begins_anew = bytes.first().is_some_and(|first| self.utf8.ends_before(*first));
        let start = self.chars + usize::from(begins_anew);
        let mut text = String::new();
        self.utf8.push(bytes, &mut text);
        self.chars += text.chars().count();
        start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_table_is_a_bijection_onto_the_bytes() {
        let table = byte_level_table();
        let mut seen: Vec<u8> = table.iter().flatten().copied().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
        assert_eq!(table['Ġ' as usize], Some(b' '));
        assert_eq!(table['Ċ' as usize], Some(b'\n'));
        assert_eq!(table['é' as usize], Some(0xe9));
    }

    #[test]
    fn added_tokens_are_text_with_spelled_spaces_and_special_ones_are_invisible() {
        let tokens = ["\u{2581}\u{2581}", "<0x41>", "<b>"];
        use TokenKind::{Added, Learned, Special};
        let visible = |spelling: &Spelling, kind| {
            let table = TokenBytes::spelled(spelling, tokens.iter().map(|token| Some((*token, kind))));
            table.decode(&[0, 1, 2])
        };
        let sentence_piece = Spelling::SentencePiece;
        assert_eq!(visible(&sentence_piece, Learned), "  A<b>");
        assert_eq!(visible(&sentence_piece, Added), "  <0x41><b>");
        assert_eq!(visible(&sentence_piece, Special), "");
        assert_eq!(visible(&Spelling::byte_level(), Added), "\u{2581}\u{2581}<0x41><b>");
    }

    /// The characters of the whole text, each with the bytes it was made of, say where every token
    /// begins, however the text is cut into tokens.
    #[test]
    fn positions_are_those_of_the_characters_in_the_whole_text() {
        let bytes =
            "aé€😀\u{feff}b".bytes().chain([0xff, b'x', 0xe2, 0x82, b'y', 0xf0, 0x9f, 0xe2, 0x82, 0xac]);
        let bytes: Vec<u8> = bytes.collect();
        let mut char_of_byte = Vec::new();
        let mut chars = 0;
        for chunk in bytes.utf8_chunks() {
            for char in chunk.valid().chars() {
                char_of_byte.extend(std::iter::repeat_n(chars, char.len_utf8()));
                chars += 1;
            }
            char_of_byte.extend(std::iter::repeat_n(chars, chunk.invalid().len()));
            chars += usize::from(!chunk.invalid().is_empty());
        }
        assert_eq!(char_of_byte.len(), bytes.len());
        for cuts in 0..1u32 << (bytes.len() - 1).min(16) {
            let mut position = TextPosition::default();
            let mut start = 0;
            for end in 1..=bytes.len() {
                if end == bytes.len() || end > 16 || cuts & 1 << (end - 1) != 0 {
                    assert_eq!(position.advance(&bytes[start..end]), char_of_byte[start], "{cuts:b} {start}");
                    start = end;
                }
            }
        }
    }

    #[test]
    fn any_cut_of_any_bytes_decodes_as_the_whole() {
        let bytes = "a é € 😀 \u{feff}".bytes().chain([0xff, b'x', 0xe2, 0x82, b'y', 0xf0, 0x9f]);
        let bytes: Vec<u8> = bytes.collect();
        let whole = String::from_utf8_lossy(&bytes).into_owned();
        for first in 0..bytes.len() {
            for second in first..bytes.len() {
                let mut assembler = Utf8Assembler::default();
                let mut text = String::new();
                for piece in [&bytes[..first], &bytes[first..second], &bytes[second..]] {
                    assembler.push(piece, &mut text);
                }
                assembler.finish(&mut text);
                assert_eq!(text, whole, "cut at {first} and {second}");
            }
        }
    }
}
