//! Stop strings, found across the borders of the pieces a text arrives in.

/// Cuts a text that arrives in pieces at the first stop string.
///
/// Text that may turn out to be the beginning of a stop string is kept back until that is decided,
/// so no character of a stop string is ever let out. When several stop strings are complete at once
/// the one that begins first wins.
pub(crate) struct StopStrings {
    stops: Vec<String>,
    held: String,
}

impl StopStrings {
    /// Empty strings are ignored: they would match everywhere.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self { stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(), held: String::new() }
    }

    /// Adds `piece`; appends to `out` what is certain; true when a stop string is complete.
    pub(crate) fn push(&mut self, piece: &str, out: &mut String) -> bool {
        self.held.push_str(piece);
        let first = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(start) = first {
            out.push_str(&self.held[..start]);
            self.held.clear();
            return true;
        }
        let keep = self.stops.iter().map(|stop| unfinished(&self.held, stop)).max().unwrap_or(0);
        out.extend(self.held.drain(..self.held.len() - keep));
        false
    }

    /// The end of the text: what was kept back is text after all.
    pub(crate) fn finish(&mut self, out: &mut String) {
        out.push_str(&std::mem::take(&mut self.held));
    }
}

/// Length of the longest end of `text` that is a beginning of `stop`, `stop` itself excluded.
fn unfinished(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    // Equal bytes begin at the same character border, so the cut is a border of `text`.
    (1..=longest)
        .rev()
        .find(|&len| text.as_bytes()[text.len() - len..] == stop.as_bytes()[..len])
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unfinished_end_is_found_at_any_length() {
        assert_eq!(unfinished("ab", "abc"), 2);
        assert_eq!(unfinished("xa", "abc"), 1);
        assert_eq!(unfinished("abc", "abc"), 0, "a whole stop string is not an unfinished one");
        assert_eq!(unfinished("aaa", "aab"), 2);
        assert_eq!(unfinished("", "a"), 0);
        assert_eq!(unfinished("é", "éa"), 2);
    }

    #[test]
    fn no_stop_strings_let_everything_through_at_once() {
        let mut stops = StopStrings::new(vec![String::new()]);
        let mut out = String::new();
        assert!(!stops.push("hello", &mut out));
        assert_eq!(out, "hello");
    }
}
