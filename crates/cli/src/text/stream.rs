//! The text side of one generated sequence: token ids in, pieces of visible text out.

use std::sync::Arc;

use super::{
    detokenize::{TokenBytes, Utf8Assembler},
    stop::{StopSet, StopStrings},
};

/// Detokenizer and stop strings of one sequence.
pub(crate) struct TextStream {
    tokens: Arc<TokenBytes>,
    utf8: Utf8Assembler,
    stops: StopStrings,
    /// Tokens to come whose text is not searched for stop strings.
    unsearched: usize,
}

impl TextStream {
    /// A new sequence that ends at any of `stops`, which are looked for after `min_tokens` tokens.
    pub(crate) fn new(tokens: Arc<TokenBytes>, stops: StopSet, min_tokens: usize) -> Self {
        let (utf8, stops) = (Utf8Assembler::default(), StopStrings::new(stops));
        Self { tokens, utf8, stops, unsearched: min_tokens }
    }

    /// Adds one token; appends the text that is certain by now to `out`; true at a stop string.
    pub(crate) fn push(&mut self, token_id: u32, out: &mut String) -> bool {
        let tokens = Arc::clone(&self.tokens);
        self.push_bytes(tokens.visible(token_id), out)
    }

    fn push_bytes(&mut self, bytes: &[u8], out: &mut String) -> bool {
        if self.unsearched > 0 {
            self.unsearched -= 1;
            self.utf8.push(bytes, out);
            return false;
        }
        let mut piece = String::new();
        self.utf8.push(bytes, &mut piece);
        self.stops.push(&piece, out)
    }

    /// The end of the sequence (not after a stop string): appends what was kept back. True when that
    /// completed a stop string.
    pub(crate) fn finish(&mut self, out: &mut String) -> bool {
        let mut piece = String::new();
        self.utf8.finish(&mut piece);
        let stopped = self.stops.push(&piece, out);
        self.stops.finish(out);
        stopped
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct Table<Row> {
        rows: Vec<Row>,
    }

    #[derive(Deserialize)]
    struct StopRow {
        pieces: Vec<String>,
        stop: Vec<String>,
        text: String,
        finish: String,
    }

    #[derive(Deserialize)]
    struct Utf8Row {
        hex: Vec<String>,
        #[serde(default)]
        stop: Vec<String>,
        text: String,
    }

    /// Feeds `pieces` one by one and as one; returns the text of both ways and whether it stopped.
    fn drive(pieces: &[Vec<u8>], stops: &[String]) -> (String, bool) {
        let no_tokens = Arc::new(TokenBytes::empty());
        let mut stream = TextStream::new(no_tokens, StopSet::new(stops.to_vec()), 0);
        let mut text = String::new();
        for piece in pieces {
            if stream.push_bytes(piece, &mut text) {
                return (text, true);
            }
            for stop in stops {
                assert!(!text.contains(stop.as_str()), "{stop:?} let out in {text:?}");
            }
        }
        let stopped = stream.finish(&mut text);
        (text, stopped)
    }

    #[test]
    fn stop_strings_over_token_borders() {
        let table: Table<StopRow> =
            serde_json::from_str(include_str!("../../testdata/stop_pieces.json")).unwrap();
        assert!(table.rows.len() >= 11);
        for row in table.rows {
            let eos = row.pieces.last().is_some_and(|piece| piece == "<eos>");
            let pieces: Vec<Vec<u8>> = row
                .pieces
                .iter()
                .filter(|piece| *piece != "<eos>")
                .map(|piece| piece.clone().into_bytes())
                .collect();
            let (text, stopped) = drive(&pieces, &row.stop);
            assert_eq!(text, row.text, "{:?} with {:?}", row.pieces, row.stop);
            assert_eq!(stopped || eos, row.finish == "stop", "{:?} with {:?}", row.pieces, row.stop);
        }
    }

    #[test]
    fn characters_split_over_tokens() {
        let table: Table<Utf8Row> =
            serde_json::from_str(include_str!("../../testdata/utf8_pieces.json")).unwrap();
        assert!(table.rows.len() >= 9);
        for row in table.rows {
            let pieces: Vec<Vec<u8>> = row.hex.iter().map(|hex| bytes_of(hex)).collect();
            assert_eq!(drive(&pieces, &row.stop).0, row.text, "{:?}", row.hex);
        }
    }

    #[test]
    fn stop_strings_are_looked_for_after_min_tokens() {
        let stops = StopSet::new(["b".to_owned()]);
        let mut stream = TextStream::new(Arc::new(TokenBytes::empty()), stops, 2);
        let mut text = String::new();
        assert!(!stream.push_bytes(b"ab", &mut text));
        assert!(!stream.push_bytes(b"cb", &mut text));
        assert!(stream.push_bytes(b"ab", &mut text));
        assert_eq!(text, "abcba");
    }

    fn bytes_of(hex: &str) -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
    }
}
