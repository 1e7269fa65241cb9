//! The tokenizer inside a GGUF file, built as a [`Tokenizer`] like the one of `tokenizer.json`.

use std::collections::HashSet;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::quantized::gguf_file::Value;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, Tokenizer,
    decoders::{fuse::Fuse, sequence::Sequence as DecoderSequence, strip::Strip},
    models::bpe::{BPE, Vocab},
    normalizers::{Prepend, Replace, Sequence as NormalizerSequence},
    processors::template::{SpecialToken, TemplateProcessing},
};

use super::pretokenize;

/// `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// The key/value part of a GGUF file, read with errors that name the key.
pub(crate) struct Metadata<'a>(pub(crate) &'a std::collections::HashMap<String, Value>);

impl Metadata<'_> {
    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>> {
        self.0
            .get(key)
            .map(|value| match value {
                Value::String(text) => Ok(text.as_str()),
                other => Err(wrong_type(key, "a string", other)),
            })
            .transpose()
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.0
            .get(key)
            .map(|value| match value {
                Value::Bool(flag) => Ok(*flag),
                other => Err(wrong_type(key, "a bool", other)),
            })
            .transpose()
    }

    pub(crate) fn token_id(&self, key: &str) -> Result<Option<u32>> {
        self.0
            .get(key)
            .map(|value| integer(value).and_then(|id| u32::try_from(id).ok()))
            .map(|id| id.ok_or_else(|| anyhow!("GGUF key {key} is not a token id")))
            .transpose()
    }

    fn list<T>(&self, key: &str, what: &str, item: impl Fn(&Value) -> Option<T>) -> Result<Option<Vec<T>>> {
        let Some(value) = self.0.get(key) else { return Ok(None) };
        let Value::Array(values) = value else { return Err(wrong_type(key, "an array", value)) };
        values
            .iter()
            .map(|value| item(value).ok_or_else(|| wrong_type(key, what, value)))
            .collect::<Result<_>>()
            .map(Some)
    }

    fn texts(&self, key: &str) -> Result<Option<Vec<String>>> {
        self.list(key, "strings", |value| match value {
            Value::String(text) => Some(text.clone()),
            _ => None,
        })
    }
}

fn wrong_type(key: &str, expected: &str, got: &Value) -> anyhow::Error {
    anyhow!("GGUF key {key} should hold {expected}, not {:?}", got.value_type())
}

fn integer(value: &Value) -> Option<i64> {
    match *value {
        Value::U8(v) => Some(v.into()),
        Value::I8(v) => Some(v.into()),
        Value::U16(v) => Some(v.into()),
        Value::I16(v) => Some(v.into()),
        Value::U32(v) => Some(v.into()),
        Value::I32(v) => Some(v.into()),
        Value::U64(v) => v.try_into().ok(),
        Value::I64(v) => Some(v),
        _ => None,
    }
}

/// Vocabulary of the file.
struct GgufVocab {
    tokens: Vec<String>,
    types: Vec<TokenType>,
}

impl GgufVocab {
    fn read(metadata: &Metadata) -> Result<Self> {
        let tokens = metadata
            .texts("tokenizer.ggml.tokens")?
            .context("the GGUF file has no tokenizer: key tokenizer.ggml.tokens is missing")?;
        let types = metadata
            .list("tokenizer.ggml.token_type", "token types from 1 to 6", |value| {
                Some(match integer(value)? {
                    0 | 1 => TokenType::Normal,
                    2 => TokenType::Unknown,
                    3 => TokenType::Control,
                    4 => TokenType::UserDefined,
                    5 => TokenType::Unused,
                    6 => TokenType::Byte,
                    _ => return None,
                })
            })?
            .unwrap_or_else(|| vec![TokenType::Normal; tokens.len()]);
        ensure!(
            types.len() == tokens.len(),
            "GGUF keys tokenizer.ggml.tokens and tokenizer.ggml.token_type differ in length: {} and {}",
            tokens.len(),
            types.len()
        );
        Ok(Self { tokens, types })
    }

    fn ids(&self) -> Vocab {
        self.tokens.iter().cloned().zip(0u32..).collect()
    }

    fn of_type(&self, wanted: TokenType) -> impl Iterator<Item = &String> {
        self.tokens.iter().zip(&self.types).filter(move |(_, kind)| **kind == wanted).map(|(token, _)| token)
    }

    fn token(&self, id: u32, key: &str) -> Result<&String> {
        self.tokens.get(id as usize).with_context(|| {
            format!("GGUF key {key} is {id}, but there are only {} tokens", self.tokens.len())
        })
    }
}

/// Builds the tokenizer that `tokenizer.ggml.*` describes.
pub(crate) fn tokenizer(metadata: &Metadata) -> Result<Tokenizer> {
    let vocab = GgufVocab::read(metadata)?;
    let model = metadata
        .text("tokenizer.ggml.model")?
        .context("the GGUF file has no tokenizer: key tokenizer.ggml.model is missing")?;
    let mut tokenizer = match model {
        "gpt2" => byte_level_bpe(metadata, &vocab)?,
        "llama" => sentence_piece_bpe(metadata, &vocab)?,
        other => bail!("GGUF tokenizer model '{other}' is not supported; only 'gpt2' and 'llama' are"),
    };
    add_tokens(&mut tokenizer, &vocab, model == "llama")?;
    add_begin_and_end(&mut tokenizer, metadata, &vocab, model == "llama")?;
    Ok(tokenizer)
}

fn byte_level_bpe(metadata: &Metadata, vocab: &GgufVocab) -> Result<Tokenizer> {
    let merges = metadata
        .texts("tokenizer.ggml.merges")?
        .context("the GGUF file has no merges: key tokenizer.ggml.merges is missing")?;
    // A merge is two tokens with a space between them; the first may begin with a space itself.
    let merges = merges
        .iter()
        .map(|merge| {
            let first = merge.chars().next().map_or(0, char::len_utf8);
            let space = merge[first..].find(' ').map(|at| at + first);
            space
                .map(|at| (merge[..at].to_owned(), merge[at + 1..].to_owned()))
                .with_context(|| format!("merge '{merge}' in tokenizer.ggml.merges is not two tokens"))
        })
        .collect::<Result<Vec<_>>>()?;
    let rules = pretokenize::rules(metadata.text("tokenizer.ggml.pre")?.unwrap_or("default"))?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocab.ids(), merges)
        .ignore_merges(rules.whole_words_first)
        .build()
        .map_err(|error| anyhow!("tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}"))?;
    let mut tokenizer = Tokenizer::new(bpe);
    tokenizer.with_normalizer(rules.normalizer).map_err(tokenizer_error)?;
    tokenizer.with_pre_tokenizer(Some(rules.pre_tokenizer));
    tokenizer.with_decoder(Some(tokenizers::decoders::byte_level::ByteLevel::default()));
    Ok(tokenizer)
}

/// SentencePiece's BPE merges whichever neighbours form the best-scored token. As a list of merges:
/// every split of every token into two tokens, best score first.
fn sentence_piece_bpe(metadata: &Metadata, vocab: &GgufVocab) -> Result<Tokenizer> {
    let scores = metadata
        .list("tokenizer.ggml.scores", "floats", |value| match *value {
            Value::F32(score) => Some(score),
            _ => None,
        })?
        .context("the GGUF file has no scores: key tokenizer.ggml.scores is missing")?;
    ensure!(
        scores.len() == vocab.tokens.len(),
        "GGUF keys tokenizer.ggml.tokens and tokenizer.ggml.scores differ in length: {} and {}",
        vocab.tokens.len(),
        scores.len()
    );
    let mut builder = BPE::builder()
        .vocab_and_merges(vocab.ids(), merges_by_score(vocab, &scores))
        .byte_fallback(true)
        .fuse_unk(true);
    if let Some(unknown) = vocab.of_type(TokenType::Unknown).next() {
        builder = builder.unk_token(unknown.clone());
    }
    let bpe = builder.build().map_err(tokenizer_error)?;

    let space_prefix = metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let mut normalizers: Vec<NormalizerWrapper> = Vec::new();
    let mut decoders: Vec<DecoderWrapper> = vec![
        Replace::new("\u{2581}", " ").map_err(tokenizer_error)?.into(),
        tokenizers::decoders::byte_fallback::ByteFallback::new().into(),
        Fuse::new().into(),
    ];
    if space_prefix {
        normalizers.push(Prepend::new("\u{2581}".to_owned()).into());
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    normalizers.push(Replace::new(" ", "\u{2581}").map_err(tokenizer_error)?.into());
    let mut tokenizer = Tokenizer::new(bpe);
    tokenizer.with_normalizer(Some(NormalizerSequence::new(normalizers))).map_err(tokenizer_error)?;
    tokenizer.with_decoder(Some(DecoderSequence::new(decoders)));
    Ok(tokenizer)
}

fn merges_by_score(vocab: &GgufVocab, scores: &[f32]) -> Vec<(String, String)> {
    let mergeable =
        |kind: TokenType| matches!(kind, TokenType::Normal | TokenType::UserDefined | TokenType::Unused);
    let known: HashSet<&str> = vocab
        .tokens
        .iter()
        .zip(&vocab.types)
        .filter(|(_, kind)| mergeable(**kind))
        .map(|(token, _)| token.as_str())
        .collect();
    let mut merges: Vec<(f32, &str, &str)> = Vec::new();
    for ((token, &kind), &score) in vocab.tokens.iter().zip(&vocab.types).zip(scores) {
        if !mergeable(kind) {
            continue;
        }
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if known.contains(left) && known.contains(right) {
                merges.push((score, left, right));
            }
        }
    }
    // Stable: splits of one token stay in order, the longest left part first.
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.len().cmp(&a.1.len())));
    merges.into_iter().map(|(_, left, right)| (left.to_owned(), right.to_owned())).collect()
}

/// Control tokens are matched in the raw text and have no visible text; user-defined ones are
/// matched too, after normalisation in SentencePiece vocabularies (theirs are written with U+2581).
fn add_tokens(tokenizer: &mut Tokenizer, vocab: &GgufVocab, sentence_piece: bool) -> Result<()> {
    let mut special: Vec<AddedToken> =
        vocab.of_type(TokenType::Control).map(|token| AddedToken::from(token.clone(), true)).collect();
    if sentence_piece {
        special.extend(vocab.of_type(TokenType::Unknown).map(|t| AddedToken::from(t.clone(), true)));
    }
    let defined = vocab
        .of_type(TokenType::UserDefined)
        .map(|token| AddedToken::from(token.clone(), false).normalized(sentence_piece));
    tokenizer.add_special_tokens(special).map_err(tokenizer_error)?;
    tokenizer.add_tokens(defined).map_err(tokenizer_error)?;
    Ok(())
}

fn add_begin_and_end(
    tokenizer: &mut Tokenizer,
    metadata: &Metadata,
    vocab: &GgufVocab,
    sentence_piece: bool,
) -> Result<()> {
    let mut template: Vec<String> = vec!["$A".to_owned()];
    let mut tokens: Vec<SpecialToken> = Vec::new();
    // SentencePiece models begin with BOS unless the file says otherwise; BPE models do not.
    for (name, default, at_end) in [("bos", sentence_piece, false), ("eos", false, true)] {
        if !metadata.flag(&format!("tokenizer.ggml.add_{name}_token"))?.unwrap_or(default) {
            continue;
        }
        let key = format!("tokenizer.ggml.{name}_token_id");
        let id = metadata.token_id(&key)?.with_context(|| format!("GGUF key {key} is missing"))?;
        let token = vocab.token(id, &key)?.clone();
        let name = name.to_owned();
        tokens.push(SpecialToken::new(name.clone(), vec![id], vec![token]).map_err(tokenizer_error)?);
        if at_end {
            template.push(name);
        } else {
            template.insert(0, name);
        }
    }
    if !tokens.is_empty() {
        let template = TemplateProcessing::builder()
            .try_single(template)
            .map_err(|error| anyhow!("{error}"))?
            .special_tokens(tokens)
            .build()
            .map_err(|error| anyhow!("{error}"))?;
        tokenizer.with_post_processor(Some(template));
    }
    Ok(())
}

fn tokenizer_error(error: tokenizers::Error) -> anyhow::Error {
    anyhow!("the tokenizer of the GGUF file cannot be built: {error}")
}
