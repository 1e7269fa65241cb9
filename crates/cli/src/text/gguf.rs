//! The tokenizer inside a GGUF file.

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokenizers::{
    AddedToken, DecoderWrapper, Model, ModelWrapper, NormalizerWrapper, PostProcessorWrapper,
    PreTokenizerWrapper, TokenizerImpl,
    models::bpe::{BPE, Vocab},
    normalizers::{Prepend, Replace, Sequence as NormalizerSequence},
    processors::template::{SpecialToken, TemplateProcessing},
};
use turboquant_engine::gguf::{Metadata, Texts};

use super::{
    Tokenizer,
    detokenize::{Spelling, TokenBytes, TokenKind},
    pretokenize,
    sentence_piece::SentencePiece,
};

use crate::error::wrong_use;

/// A tokenizer around `M`, with the parts that `tokenizer.json` may name.
pub(crate) type Around<M> =
    TokenizerImpl<M, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

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

/// How the vocabulary is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    /// Merges over bytes, each written as one printable character.
    ByteLevel,
    /// Scores over text, a space written as U+2581.
    SentencePiece,
}

/// Vocabulary of the file.
pub(crate) struct GgufVocab<'a> {
    tokens: &'a Texts,
    types: Vec<TokenType>,
    family: Family,
}

impl<'a> GgufVocab<'a> {
    pub(crate) fn read(metadata: &'a Metadata) -> Result<Self> {
        let missing = |key: &str| format!("the GGUF file has no tokenizer: key {key} is missing");
        let key = "tokenizer.ggml.tokens";
        let tokens = metadata.texts(key)?.with_context(|| missing(key))?;
        ensure!(u32::try_from(tokens.len()).is_ok(), "GGUF key {key} has more tokens than ids can number");
        let types = match metadata.numbers("tokenizer.ggml.token_type")? {
            Some(types) => types.into_iter().map(token_type).collect::<Result<Vec<_>>>()?,
            None => vec![TokenType::Normal; tokens.len()],
        };
        ensure!(
            types.len() == tokens.len(),
            "GGUF keys tokenizer.ggml.tokens and tokenizer.ggml.token_type differ in length: {} and {}",
            tokens.len(),
            types.len()
        );
        let key = "tokenizer.ggml.model";
        let family = match metadata.text(key)?.with_context(|| missing(key))? {
            "gpt2" => Family::ByteLevel,
            "llama" => Family::SentencePiece,
            other => {
                return Err(wrong_use(format!(
                    "GGUF tokenizer model '{other}' is not supported; only 'gpt2' and 'llama' are"
                )));
            }
        };
        Ok(Self { tokens, types, family })
    }

    fn of_type(&self, wanted: TokenType) -> impl Iterator<Item = &'a str> {
        self.tokens.iter().zip(&self.types).filter(move |(_, kind)| **kind == wanted).map(|(token, _)| token)
    }

    /// Text of a token, if there is one of that id.
    pub(crate) fn token(&self, id: u32) -> Option<&'a str> {
        self.tokens.get(id as usize)
    }

    /// Tokens that are matched in the raw text and have no visible text themselves, with their ids.
    pub(crate) fn control_tokens(&self) -> impl Iterator<Item = (u32, &'a str)> {
        let numbered = (0..).zip(self.tokens.iter()).zip(&self.types);
        numbered.filter(|(_, kind)| **kind == TokenType::Control).map(|(token, _)| token)
    }

    /// What each token stands for in a text.
    pub(crate) fn token_bytes(&self) -> TokenBytes {
        let spelling = match self.family {
            Family::ByteLevel => Spelling::byte_level(),
            Family::SentencePiece => Spelling::SentencePiece,
        };
        TokenBytes::spelled(
            &spelling,
            self.tokens.iter().zip(&self.types).map(|(token, kind)| {
                let kind = match (kind, self.family) {
                    (TokenType::Control, _) | (TokenType::Unknown, Family::SentencePiece) => {
                        TokenKind::Special
                    }
                    (TokenType::UserDefined, _) => TokenKind::Added,
                    _ => TokenKind::Learned,
                };
                Some((token, kind))
            }),
        )
    }
}

fn token_type(number: f64) -> Result<TokenType> {
    Ok(match number {
        0.0 | 1.0 => TokenType::Normal,
        2.0 => TokenType::Unknown,
        3.0 => TokenType::Control,
        4.0 => TokenType::UserDefined,
        5.0 => TokenType::Unused,
        6.0 => TokenType::Byte,
        other => bail!("GGUF key tokenizer.ggml.token_type has {other}, expected numbers from 1 to 6"),
    })
}

/// Builds the tokenizer that `tokenizer.ggml.*` describes.
pub(crate) fn tokenizer(metadata: &Metadata, vocab: &GgufVocab) -> Result<Tokenizer> {
    match vocab.family {
        Family::ByteLevel => {
            let mut tokenizer = byte_level_bpe(metadata, vocab)?;
            finish(&mut tokenizer, metadata, vocab)?;
            Ok(Tokenizer::Hub(Box::new(tokenizer)))
        }
        Family::SentencePiece => {
            let mut tokenizer = sentence_piece_bpe(metadata, vocab)?;
            finish(&mut tokenizer, metadata, vocab)?;
            Ok(Tokenizer::SentencePiece(Box::new(tokenizer)))
        }
    }
}

fn finish<M: Model>(tokenizer: &mut Around<M>, metadata: &Metadata, vocab: &GgufVocab) -> Result<()> {
    add_tokens(tokenizer, vocab)?;
    add_begin_and_end(tokenizer, metadata, vocab)
}

fn byte_level_bpe(metadata: &Metadata, vocab: &GgufVocab) -> Result<Around<ModelWrapper>> {
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
    let ids: Vocab = vocab.tokens.iter().map(str::to_owned).zip(0u32..).collect();
    let bpe = BPE::builder()
        .vocab_and_merges(ids, merges)
        .ignore_merges(rules.whole_words_first)
        .build()
        .map_err(|error| anyhow!("tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}"))?;
    let mut tokenizer = TokenizerImpl::new(bpe.into());
    tokenizer.with_normalizer(rules.normalizer).map_err(tokenizer_error)?;
    tokenizer.with_pre_tokenizer(Some(rules.pre_tokenizer));
    Ok(tokenizer)
}

fn sentence_piece_bpe(metadata: &Metadata, vocab: &GgufVocab) -> Result<Around<SentencePiece>> {
    let scores = metadata
        .numbers("tokenizer.ggml.scores")?
        .context("the GGUF file has no scores: key tokenizer.ggml.scores is missing")?;
    ensure!(
        scores.len() == vocab.tokens.len(),
        "GGUF keys tokenizer.ggml.tokens and tokenizer.ggml.scores differ in length: {} and {}",
        vocab.tokens.len(),
        scores.len()
    );
    let scores = scores.into_iter().zip(&vocab.types).map(|(score, kind)| {
        let merges = matches!(kind, TokenType::Normal | TokenType::UserDefined | TokenType::Unused);
        merges.then_some(score as f32)
    });
    let unknown = vocab.types.iter().position(|kind| *kind == TokenType::Unknown).map(|id| id as u32);
    let model = SentencePiece::new(vocab.tokens.clone(), scores.collect(), unknown);

    let mut normalizers: Vec<NormalizerWrapper> = Vec::new();
    if metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true) {
        normalizers.push(Prepend::new("\u{2581}".to_owned()).into());
    }
    normalizers.push(Replace::new(" ", "\u{2581}").map_err(tokenizer_error)?.into());
    let mut tokenizer = TokenizerImpl::new(model);
    tokenizer.with_normalizer(Some(NormalizerSequence::new(normalizers))).map_err(tokenizer_error)?;
    Ok(tokenizer)
}

/// Control tokens are matched in the raw text and have no visible text; user-defined ones are
/// matched too, after normalisation in SentencePiece vocabularies (theirs are written with U+2581).
fn add_tokens<M: Model>(tokenizer: &mut Around<M>, vocab: &GgufVocab) -> Result<()> {
    let sentence_piece = vocab.family == Family::SentencePiece;
    let mut special: Vec<AddedToken> =
        vocab.of_type(TokenType::Control).map(|token| AddedToken::from(token, true)).collect();
    if sentence_piece {
        special.extend(vocab.of_type(TokenType::Unknown).map(|token| AddedToken::from(token, true)));
    }
    let defined = vocab
        .of_type(TokenType::UserDefined)
        .map(|token| AddedToken::from(token, false).normalized(sentence_piece));
    tokenizer.add_special_tokens(special).map_err(tokenizer_error)?;
    tokenizer.add_tokens(defined).map_err(tokenizer_error)?;
    Ok(())
}

fn add_begin_and_end<M: Model>(
    tokenizer: &mut Around<M>,
    metadata: &Metadata,
    vocab: &GgufVocab,
) -> Result<()> {
    let mut template: Vec<String> = vec!["$A".to_owned()];
    let mut tokens: Vec<SpecialToken> = Vec::new();
    // SentencePiece models begin with BOS unless the file says otherwise; BPE models do not.
    let begins = vocab.family == Family::SentencePiece;
    for (name, default, at_end) in [("bos", begins, false), ("eos", false, true)] {
        if !metadata.flag(&format!("tokenizer.ggml.add_{name}_token"))?.unwrap_or(default) {
            continue;
        }
        let key = format!("tokenizer.ggml.{name}_token_id");
        let id = metadata.token_id(&key)?.with_context(|| format!("GGUF key {key} is missing"))?;
        let token = vocab.token(id).with_context(|| {
            format!("GGUF key {key} is {id}, but there are only {} tokens", vocab.tokens.len())
        })?;
        let name = name.to_owned();
        tokens.push(
            SpecialToken::new(name.clone(), vec![id], vec![token.to_owned()]).map_err(tokenizer_error)?,
        );
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
