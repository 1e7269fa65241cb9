//! The tokenizer of SentencePiece's BPE: whichever neighbours form the best-scored token are merged,
//! until none do. Its vocabulary stays as it lies in the file, beside an index of four bytes a token; as
//! a table of merges the 262,144 tokens of Gemma would take forty times that.

use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, HashMap},
    path::{Path, PathBuf},
};

use tokenizers::{Model, Result, Token, models::bpe::BpeTrainer};
use turboquant_engine::gguf::Texts;

/// Vocabulary and scores.
pub(crate) struct SentencePiece {
    tokens: Texts,
    /// Ids, sorted by the tokens' texts; of equal texts the last id alone.
    sorted: Vec<u32>,
    /// What a token is worth as the result of a merge; `None` where it is no result and no part of one.
    scores: Vec<Option<f32>>,
    /// The tokens that stand for single bytes.
    bytes: Vec<Option<u32>>,
    /// What stands for text that no token does, and its text.
    unknown: Option<u32>,
}

impl SentencePiece {
    /// `scores` has one entry per token.
    pub(crate) fn new(tokens: Texts, scores: Vec<Option<f32>>, unknown: Option<u32>) -> Self {
        // Ids are 32 bits wide; the file's list cannot be longer, or its ids could not be named.
        let mut sorted: Vec<u32> = (0..tokens.len() as u32).collect();
        let text = |id: &u32| tokens.get(*id as usize).unwrap_or_default();
        sorted.sort_unstable_by(|a, b| text(a).cmp(text(b)).then(b.cmp(a)));
        sorted.dedup_by(|next, kept| text(next) == text(kept));
        let mut model = Self { tokens, sorted, scores, bytes: Vec::new(), unknown };
        model.bytes = (0..=255u8).map(|byte| model.token_to_id(&format!("<0x{byte:02X}>"))).collect();
        model
    }

    fn text(&self, id: u32) -> &str {
        self.tokens.get(id as usize).unwrap_or_default()
    }

    fn score(&self, id: u32) -> Option<f32> {
        self.scores.get(id as usize).copied().flatten()
    }

    /// The characters of `text` as tokens: what has none of its own is spelled in bytes, or unknown.
    fn symbols(&self, text: &str) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
        let push = |id, start, end, symbols: &mut Vec<Symbol>| {
            let at = symbols.len();
            symbols.push(Symbol { id, start, end, before: at.checked_sub(1), after: Some(at + 1) });
        };
        for (start, char) in text.char_indices() {
            let end = start + char.len_utf8();
            if let Some(id) = self.token_to_id(&text[start..end]) {
                push(id, start, end, &mut symbols);
                continue;
            }
            let spelled: Option<Vec<u32>> =
                text.as_bytes()[start..end].iter().map(|byte| self.bytes[usize::from(*byte)]).collect();
            match (spelled, self.unknown, symbols.last_mut()) {
                (Some(ids), ..) => {
                    for (at, id) in (start..).zip(ids) {
                        push(id, at, at + 1, &mut symbols);
                    }
                }
                // Neighbours that are unknown are one token.
                (None, Some(unknown), Some(last)) if last.id == unknown && last.end == start => {
                    last.end = end
                }
                (None, Some(unknown), _) => push(unknown, start, end, &mut symbols),
                (None, None, _) => {}
            }
        }
        if let Some(last) = symbols.last_mut() {
            last.after = None;
        }
        symbols
    }

    /// The merge of two neighbours, if it makes a token.
    fn merge(&self, text: &str, symbols: &[Symbol], left: usize, right: usize) -> Option<Merge> {
        let (first, second) = (&symbols[left], &symbols[right]);
        self.score(first.id).and(self.score(second.id))?;
        let id = self.token_to_id(text.get(first.start..second.end)?)?;
        let left_bytes = first.end - first.start;
        Some(Merge {
            score: self.score(id)?,
            left_bytes,
            id: Reverse(id),
            left: Reverse(left),
            right,
            end: second.end,
        })
    }
}

/// A token on its way, in a list of neighbours.
struct Symbol {
    id: u32,
    /// Bytes of the text; `start == end` once it is part of the symbol before it.
    start: usize,
    end: usize,
    before: Option<usize>,
    after: Option<usize>,
}

/// Two neighbours that form a token. The greatest is done first: the best score; of equal ones the
/// longest left part, the lowest id, the leftmost.
struct Merge {
    score: f32,
    left_bytes: usize,
    id: Reverse<u32>,
    left: Reverse<usize>,
    right: usize,
    /// Where the right neighbour ended: it may have grown since.
    end: usize,
}

impl Ord for Merge {
    fn cmp(&self, other: &Self) -> Ordering {
        let key = |merge: &Self| (merge.left_bytes, merge.id, merge.left);
        self.score.total_cmp(&other.score).then_with(|| key(self).cmp(&key(other)))
    }
}

impl PartialOrd for Merge {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Merge {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Merge {}

impl Model for SentencePiece {
    type Trainer = BpeTrainer;

    fn tokenize(&self, text: &str) -> Result<Vec<Token>> {
        let mut symbols = self.symbols(text);
        let neighbours = 1..symbols.len();
        let mut queue: BinaryHeap<Merge> =
            neighbours.filter_map(|right| self.merge(text, &symbols, right - 1, right)).collect();
        while let Some(Merge { left_bytes, id, left, right, end, .. }) = queue.pop() {
            let left = left.0;
            let first = &symbols[left];
            // Either neighbour has become part of another token since.
            if first.end - first.start != left_bytes
                || first.after != Some(right)
                || symbols[right].end != end
            {
                continue;
            }
            let after = symbols[right].after;
            symbols[right].start = end;
            let merged = &mut symbols[left];
            (merged.id, merged.end, merged.after) = (id.0, end, after);
            let before = merged.before;
            if let Some(after) = after {
                symbols[after].before = Some(left);
                queue.extend(self.merge(text, &symbols, left, after));
            }
            if let Some(before) = before {
                queue.extend(self.merge(text, &symbols, before, left));
            }
        }
        let whole = symbols.into_iter().filter(|symbol| symbol.start < symbol.end);
        Ok(whole.map(|s| Token::new(s.id, self.text(s.id).to_owned(), (s.start, s.end))).collect())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        let at = self.sorted.binary_search_by(|id| self.text(*id).cmp(token)).ok()?;
        Some(self.sorted[at])
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.tokens.get(id as usize).map(str::to_owned)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.sorted.iter().map(|id| (self.text(*id).to_owned(), *id)).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.sorted.len()
    }

    fn save(&self, _: &Path, _: Option<&str>) -> Result<Vec<PathBuf>> {
        Err("a vocabulary that was read from a GGUF file is not written".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use tokenizers::models::bpe::BPE;

    use super::*;

    /// Numbers below `bound`, the same each time.
    struct Dice(u64);

    impl Dice {
        fn roll(&mut self, bound: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % bound
        }
    }

    /// The same vocabulary as a table of merges: every split of every token into two, best score first.
    fn by_merges(tokens: &[String], scores: &[Option<f32>], unknown: &str) -> BPE {
        let known: HashSet<&str> =
            tokens.iter().zip(scores).filter(|(_, score)| score.is_some()).map(|(t, _)| t.as_str()).collect();
        let mut merges: Vec<(f32, &str, &str)> = Vec::new();
        for (token, score) in tokens.iter().zip(scores) {
            let Some(score) = score else { continue };
            for (at, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(at);
                if known.contains(left) && known.contains(right) {
                    merges.push((*score, left, right));
                }
            }
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.len().cmp(&a.1.len())));
        let merges = merges.into_iter().map(|(_, a, b)| (a.to_owned(), b.to_owned())).collect();
        let vocab: tokenizers::models::bpe::Vocab = tokens.iter().cloned().zip(0..).collect();
        let builder = BPE::builder().vocab_and_merges(vocab, merges).byte_fallback(true).fuse_unk(true);
        builder.unk_token(unknown.to_owned()).build().unwrap()
    }

    /// Against the tokenizer of another house, on vocabularies and texts of few letters, so that merges
    /// compete; with equal scores and tokens that are no part of merges among them.
    #[test]
    fn merges_are_those_of_a_table_of_merges() {
        let letters = ['a', 'b', 'c', 'é', '\u{2581}'];
        for seed in 0..60 {
            let dice = &mut Dice(seed);
            let mut tokens: Vec<String> = vec!["<unk>".to_owned()];
            tokens.extend(letters.iter().map(char::to_string));
            if seed % 2 == 0 {
                tokens.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
            }
            for _ in 0..120 {
                let token: String = (0..2 + dice.roll(4)).map(|_| letters[dice.roll(5)]).collect();
                if !tokens.contains(&token) {
                    tokens.push(token);
                }
            }
            let scores: Vec<Option<f32>> = (tokens.iter().enumerate())
                .map(|(id, token)| match dice.roll(20) {
                    _ if token.starts_with('<') => None,
                    0 => None,
                    _ if seed % 3 == 0 => Some(-(id as f32)),
                    _ => Some(-(dice.roll(30) as f32)),
                })
                .collect();
            let reference = by_merges(&tokens, &scores, "<unk>");
            let ours = SentencePiece::new(tokens.iter().map(String::as_str).collect(), scores, Some(0));
            for _ in 0..50 {
                let text: String =
                    (0..dice.roll(40))
                        .map(|_| {
                            if dice.roll(12) == 0 {
                                ['x', '€'][dice.roll(2)]
                            } else {
                                letters[dice.roll(5)]
                            }
                        })
                        .collect();
                assert_eq!(
                    ours.tokenize(&text).unwrap(),
                    reference.tokenize(&text).unwrap(),
                    "{seed}: {text}"
                );
            }
        }
    }

    #[test]
    fn of_equal_texts_the_last_id_is_found() {
        let tokens: Texts = ["b", "a", "b", "a", "b"].into_iter().collect();
        let model = SentencePiece::new(tokens, vec![Some(0.0); 5], None);
        assert_eq!((model.token_to_id("a"), model.token_to_id("b")), (Some(3), Some(4)));
        assert_eq!(model.token_to_id("c"), None);
        assert_eq!(model.tokenize("bac").unwrap().len(), 2, "what is unknown is nothing");
    }
}
