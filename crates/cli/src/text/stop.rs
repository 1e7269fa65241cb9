//! Stop strings, found across the borders of the pieces a text arrives in.

use std::sync::Arc;

/// The stop strings of a request. Answers share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct StopSet(Arc<[Pattern]>);

impl StopSet {
    /// Empty strings are ignored: they would match everywhere.
    pub(crate) fn new(stops: impl IntoIterator<Item = String>) -> Self {
        Self(stops.into_iter().filter(|stop| !stop.is_empty()).map(Pattern::new).collect())
    }
}

/// A string to look for, one byte of text at a time (Knuth, Morris and Pratt).
#[derive(Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// `[bytes.len()]`: of the first `i + 1` bytes, the longest end that is also a beginning.
    borders: Vec<usize>,
}

impl Pattern {
    fn new(text: String) -> Self {
        let mut pattern = Self { bytes: text.into_bytes(), borders: vec![0] };
        for i in 1..pattern.bytes.len() {
            let border = pattern.advance(pattern.borders[i - 1], pattern.bytes[i]);
            pattern.borders.push(border);
        }
        pattern
    }

    /// How many bytes match after `byte`, when `matched` (not all) did before it.
    fn advance(&self, mut matched: usize, byte: u8) -> usize {
        while matched > 0 && self.bytes[matched] != byte {
            matched = self.borders[matched - 1];
        }
        matched + usize::from(self.bytes[matched] == byte)
    }
}

/// Cuts a text that arrives in pieces at the first stop string.
///
/// Text that may turn out to be the beginning of a stop string is kept back until that is decided,
/// so no character of a stop string is ever let out. When several stop strings are complete at once
/// the one that begins first wins. The work for a piece grows with the piece and the number of stop
/// strings, not with their lengths.
pub(crate) struct StopStrings {
    stops: StopSet,
    /// `[num_stops]`: bytes of each that the end of the text matches.
    matched: Vec<usize>,
    held: String,
}

impl StopStrings {
    pub(crate) fn new(stops: StopSet) -> Self {
        let matched = vec![0; stops.0.len()];
        Self { stops, matched, held: String::new() }
    }

    /// Adds `piece`; appends to `out` what is certain; true when a stop string is complete.
    pub(crate) fn push(&mut self, piece: &str, out: &mut String) -> bool {
        let before = self.held.len();
        self.held.push_str(piece);
        let mut first: Option<usize> = None;
        for (stop, matched) in self.stops.0.iter().zip(&mut self.matched) {
            for (i, &byte) in piece.as_bytes().iter().enumerate() {
                *matched = stop.advance(*matched, byte);
                if *matched == stop.bytes.len() {
                    let start = before + i + 1 - *matched;
                    first = Some(first.map_or(start, |first| first.min(start)));
                    break;
                }
            }
        }
        if let Some(start) = first {
            out.push_str(&self.held[..start]);
            self.held.clear();
            self.matched.fill(0);
            return true;
        }
        // Equal bytes begin at the same character border, so the cut is a border of the text.
        let keep = self.matched.iter().copied().max().unwrap_or(0);
        out.extend(self.held.drain(..self.held.len() - keep));
        false
    }

    /// The end of the text: what was kept back is text after all.
    pub(crate) fn finish(&mut self, out: &mut String) {
        self.matched.fill(0);
        out.push_str(&std::mem::take(&mut self.held));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stop_strings(stops: &[&str]) -> StopStrings {
        StopStrings::new(StopSet::new(stops.iter().map(|&stop| stop.to_owned())))
    }

    /// What is kept back of `text`.
    fn held(text: &str, stop: &str) -> String {
        let mut stops = stop_strings(&[stop]);
        let mut out = String::new();
        assert!(!stops.push(text, &mut out), "{stop:?} in {text:?}");
        assert_eq!(out.clone() + &stops.held, text);
        stops.held
    }

    #[test]
    fn an_unfinished_end_is_found_at_any_length() {
        assert_eq!(held("ab", "abc"), "ab");
        assert_eq!(held("xa", "abc"), "a");
        assert_eq!(held("aaa", "aab"), "aa");
        assert_eq!(held("", "a"), "");
        assert_eq!(held("é", "éa"), "é");
        assert_eq!(held("xab", "y"), "");
    }

    #[test]
    fn no_stop_strings_let_everything_through_at_once() {
        let mut stops = stop_strings(&[""]);
        let mut out = String::new();
        assert!(!stops.push("hello", &mut out));
        assert_eq!(out, "hello");
    }

    /// The same by searching all of the text after every piece.
    fn search(pieces: &[&str], stops: &[&str]) -> (String, bool) {
        let mut text = String::new();
        for piece in pieces {
            text.push_str(piece);
            if let Some(start) = stops.iter().filter_map(|stop| text.find(stop)).min() {
                text.truncate(start);
                return (text, true);
            }
        }
        (text, false)
    }

    #[test]
    fn any_text_is_cut_where_a_search_of_all_of_it_cuts() {
        let stops =
            [&["aab", "ba"][..], &["abab"], &["aaaa", "aabaab"], &["é", "bé"], &["bbb", "abbb", "bb"]];
        let letters = ["a", "b", "aa", "ab", "é"];
        let (mut stopped, mut ran_on) = (0, 0);
        for number in 0..letters.len().pow(6) {
            let pieces: Vec<&str> =
                (0..6).map(|i| letters[number / letters.len().pow(i) % letters.len()]).collect();
            for stops in stops {
                let mut cut = stop_strings(stops);
                let mut out = String::new();
                let stop = pieces.iter().any(|piece| cut.push(piece, &mut out));
                if !stop {
                    cut.finish(&mut out);
                }
                assert_eq!((out, stop), search(&pieces, stops), "{pieces:?} with {stops:?}");
                *(if stop { &mut stopped } else { &mut ran_on }) += 1;
            }
        }
        assert!(stopped > 1000 && ran_on > 1000, "{stopped} {ran_on}");
    }
}
