//! How byte-level BPE models cut text into words before merging, by the name GGUF files use.

use anyhow::{Result, anyhow};
use tokenizers::{
    NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior,
    normalizers::NFC,
    pre_tokenizers::{
        byte_level::ByteLevel,
        digits::Digits,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

use crate::error::wrong_use;

/// What `tokenizer.ggml.pre` stands for.
pub(crate) struct PreTokenizerRules {
    pub(crate) normalizer: Option<NormalizerWrapper>,
    pub(crate) pre_tokenizer: PreTokenizerWrapper,
    /// A word that is a token is that token, whatever the merges say.
    pub(crate) whole_words_first: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The rules called `pre`.
pub(crate) fn rules(pre: &str) -> Result<PreTokenizerRules> {
    let gpt2 = ByteLevel::new(false, true, true);
    let (normalizer, first, whole_words_first): (_, Vec<PreTokenizerWrapper>, _) = match pre {
        "gpt-2" | "phi-2" | "roberta-bpe" | "mpt" | "olmo" => (None, vec![gpt2.into()], false),
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" => {
            (None, vec![Digits::new(true).into(), gpt2.into()], false)
        }
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "pixtral" | "lfm2" | "smaug-bpe" => {
            (None, vec![split(LLAMA3)?], true)
        }
        "qwen2" | "deepseek-r1-qwen" | "megrez" => (Some(NFC.into()), vec![split(QWEN2)?], false),
        "qwen35" => (None, vec![split(QWEN35)?], false),
        "tekken" => (None, vec![split(TEKKEN)?], true),
        "default" => {
            let punctuation = split(r"[\p{P}\$\+<=>\^~\|]+")?;
            let first = vec![punctuation, split(GPT2)?, split(r"\p{N}+")?, split("[0-9][0-9][0-9]")?];
            (None, first, false)
        }
        other => {
            return Err(wrong_use(format!(
                "pre-tokenizer '{other}' (GGUF key tokenizer.ggml.pre) is not supported; use the model's \
                 folder with its tokenizer.json instead"
            )));
        }
    };
    let byte_level = ByteLevel::new(false, true, false);
    let has_gpt2 = matches!(first.last(), Some(PreTokenizerWrapper::ByteLevel(_)));
    let last = (!has_gpt2).then(|| byte_level.into());
    let pre_tokenizer = Sequence::new(first.into_iter().chain(last).collect()).into();
    Ok(PreTokenizerRules { normalizer, pre_tokenizer, whole_words_first })
}

/// Matches and the text between them are words of their own.
fn split(pattern: &str) -> Result<PreTokenizerWrapper> {
    let pattern = SplitPattern::Regex(pattern.to_owned());
    Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
        .map(Into::into)
        .map_err(|error| anyhow!("pre-tokenizer pattern: {error}"))
}

#[cfg(test)]
mod tests {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    fn words(pre: &str, text: &str) -> Vec<String> {
        let mut pieces = PreTokenizedString::from(text);
        rules(pre).unwrap().pre_tokenizer.pre_tokenize(&mut pieces).unwrap();
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(_, (start, end), _)| text[start..end].to_owned()).collect()
    }

    /// What each pattern is known for: digits one by one or by three, line breaks with punctuation,
    /// a leading space with the word.
    #[test]
    fn words_by_rule() {
        let text = "I'll pay 1234 €!\n\nNow";
        assert_eq!(words("gpt-2", text), ["I", "'ll", " pay", " 1234", " €!", "\n", "\n", "Now"]);
        assert_eq!(
            words("smollm", text),
            ["I", "'ll", " pay", " ", "1", "2", "3", "4", " €!", "\n", "\n", "Now"]
        );
        assert_eq!(words("llama-bpe", text), ["I", "'ll", " pay", " ", "123", "4", " €!\n\n", "Now"]);
        assert_eq!(words("qwen2", text), ["I", "'ll", " pay", " ", "1", "2", "3", "4", " €!\n\n", "Now"]);
    }

    #[test]
    fn an_unknown_rule_is_refused_by_name() {
        let error = rules("no-such-rule").err().unwrap().to_string();
        assert!(error.contains("no-such-rule"), "{error}");
    }

    #[test]
    fn unknown_rules_are_wrong_use() {
        let error = rules("smollX").err().unwrap().context("model.gguf cannot be used");
        assert_eq!(crate::error::exit_code(&error), 2);
        let sentence = crate::error::sentence(&error);
        assert!(sentence.contains("'smollX'") && sentence.contains("tokenizer.json instead"), "{sentence}");
    }
}
