//! Between text and token ids: tokenizer, chat template, detokenizer, stop strings.

pub(crate) mod chat;
pub(crate) mod detokenize;
mod gguf;
mod json;
mod pretokenize;
mod sentence_piece;
pub(crate) mod stop;
mod stop_ids;
pub(crate) mod stream;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result, anyhow, ensure};
use minijinja::Value as JinjaValue;
use serde_json::Value;
use tokenizers::ModelWrapper;
use turboquant_engine::config::parse_json;
use turboquant_engine::gguf::Metadata;

use self::{
    chat::{ChatTemplate, SpecialTokens},
    detokenize::TokenBytes,
    gguf::{Around, GgufVocab},
    sentence_piece::SentencePiece,
};

/// Text to token ids.
enum Tokenizer {
    /// As `tokenizer.json` has it.
    Hub(Box<Around<ModelWrapper>>),
    /// Of a GGUF file with scores instead of merges.
    SentencePiece(Box<Around<SentencePiece>>),
}

impl Tokenizer {
    fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        let encoding = match self {
            Self::Hub(tokenizer) => tokenizer.encode_fast(text, add_special_tokens),
            Self::SentencePiece(tokenizer) => tokenizer.encode_fast(text, add_special_tokens),
        };
        let encoding = encoding.map_err(|error| anyhow!("the text cannot be tokenised: {error}"))?;
        Ok(encoding.get_ids().to_vec())
    }
}

/// Everything about a model that concerns text.
pub(crate) struct TextModel {
    tokenizer: Tokenizer,
    tokens: Arc<TokenBytes>,
    template: Option<ChatTemplate>,
    /// Put before a text whose tokenizer does not do it by itself.
    extra_bos: Option<u32>,
    stop_ids: Vec<u32>,
    longest_token: usize,
}

impl TextModel {
    /// Reads the text side of the GGUF file or model folder `path`.
    pub(crate) fn load(path: &Path) -> Result<Self> {
        if path.is_dir() { Self::from_folder(path) } else { Self::from_gguf(path) }
    }

    fn from_folder(folder: &Path) -> Result<Self> {
        let file = folder.join("tokenizer.json");
        ensure!(file.is_file(), "{} has no tokenizer.json", folder.display());
        let mut tokenizer = tokenizers::Tokenizer::from_file(&file)
            .map_err(|error| anyhow!("{} cannot be read: {error}", file.display()))?;
        // Some files still have the settings of a training run, which would cut prompts in silence.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| anyhow!("{}: {error}", file.display()))?;
        let config = read_json(&folder.join("config.json"))?;
        let generation_config = read_json(&folder.join("generation_config.json"))?;
        let tokenizer_config = read_json(&folder.join("tokenizer_config.json"))?;

        let token = |name: &str| token_text(&tokenizer_config[name]);
        let special = SpecialTokens {
            bos_token: token("bos_token").unwrap_or_default(),
            eos_token: token("eos_token").unwrap_or_default(),
            unk_token: token("unk_token"),
            pad_token: token("pad_token"),
        };
        let eos = tokenizer.token_to_id(&special.eos_token);
        let stop_ids = stop_ids::from_configs(&config, &generation_config, eos);
        let bos = tokenizer_config["add_bos_token"]
            .as_bool()
            .unwrap_or(false)
            .then(|| tokenizer.token_to_id(&special.bos_token))
            .flatten();
        let template = folder_template(folder, &tokenizer_config)?;
        let template = template.map(|source| ChatTemplate::new(&source, &special)).transpose()?;
        let tokens = TokenBytes::of(&tokenizer)?;
        Ok(Self::new(Tokenizer::Hub(Box::new(tokenizer.into_inner())), tokens, template, bos, stop_ids))
    }

    fn from_gguf(path: &Path) -> Result<Self> {
        Self::from_gguf_metadata(&Metadata::read(path)?)
            .with_context(|| format!("{} cannot be used", path.display()))
    }

    fn from_gguf_metadata(metadata: &Metadata) -> Result<Self> {
        let vocab = GgufVocab::read(metadata)?;
        let tokenizer = gguf::tokenizer(metadata, &vocab)?;
        let token = |name: &str| -> Result<Option<String>> {
            let id = metadata.token_id(&format!("tokenizer.ggml.{name}_token_id"))?;
            Ok(id.and_then(|id| vocab.token(id)).map(str::to_owned))
        };
        let special = SpecialTokens {
            bos_token: token("bos")?.unwrap_or_default(),
            eos_token: token("eos")?.unwrap_or_default(),
            unk_token: token("unknown")?,
            pad_token: token("padding")?,
        };
        let stop_ids = stop_ids::from_gguf(metadata, &vocab)?;
        let template = metadata.text("tokenizer.chat_template")?;
        let template = template.map(|source| ChatTemplate::new(source, &special)).transpose()?;
        Ok(Self::new(tokenizer, vocab.token_bytes(), template, None, stop_ids))
    }

    fn new(
        tokenizer: Tokenizer,
        tokens: TokenBytes,
        template: Option<ChatTemplate>,
        bos: Option<u32>,
        stop_ids: Vec<u32>,
    ) -> Self {
        let longest_token = tokens.longest();
        let tokens = Arc::new(tokens);
        let mut text = Self { tokenizer, tokens, template, extra_bos: None, stop_ids, longest_token };
        text.extra_bos = bos.filter(|&bos| text.encode("a").is_ok_and(|ids| ids.first() != Some(&bos)));
        text
    }

    /// Token ids of a prompt: with the BOS and EOS tokens that the model wants.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.tokenizer.encode(text, true)?;
        if let Some(bos) = self.extra_bos {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Token ids of a rendered chat, which has its special tokens in the text.
    pub(crate) fn encode_rendered(&self, text: &str) -> Result<Vec<u32>> {
        self.tokenizer.encode(text, false)
    }

    /// At least this many tokens are needed for `text`, known without tokenising it. (Normalisation
    /// shortens a text to no less than a quarter.)
    pub(crate) fn fewest_tokens(&self, text: &str) -> usize {
        text.len() / 4 / self.longest_token.max(1)
    }

    /// The prompt for a chat; `None` when the model has no chat template.
    pub(crate) fn render_chat(
        &self,
        messages: &[JinjaValue],
        tools: Option<&JinjaValue>,
    ) -> Option<Result<String>> {
        self.template.as_ref().map(|template| template.render(messages, tools))
    }

    /// Whether the model has a chat template.
    pub(crate) fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// Bytes of each token.
    pub(crate) fn tokens(&self) -> &Arc<TokenBytes> {
        &self.tokens
    }

    /// Tokens that end an answer.
    pub(crate) fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }
}

/// A missing file is `null`.
fn read_json(path: &PathBuf) -> Result<Value> {
    if !path.is_file() {
        return Ok(Value::Null);
    }
    let text = std::fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
    parse_json(&text).with_context(|| format!("{} cannot be used", path.display()))
}

/// A special token is written as its text or as an object with a `content`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

/// The template in a file of its own wins over the one in the tokenizer's configuration.
fn folder_template(folder: &Path, tokenizer_config: &Value) -> Result<Option<String>> {
    let file = folder.join("chat_template.jinja");
    if file.is_file() {
        let source =
            std::fs::read_to_string(&file).with_context(|| format!("{} cannot be read", file.display()))?;
        return Ok(Some(source));
    }
    let field = &tokenizer_config["chat_template"];
    let named_default = field
        .as_array()
        .and_then(|list| list.iter().find(|entry| entry["name"] == "default"))
        .and_then(|entry| entry["template"].as_str());
    Ok(field.as_str().or(named_default).map(str::to_owned))
}

#[cfg(test)]
mod tests;
