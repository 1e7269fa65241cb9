//! Values of fields that are read straight into what they become, and are refused while they are read when they
//! are too many: what a body costs in memory must follow its bytes.

use std::{fmt, mem};

use serde::de::{
    Deserialize, Deserializer, Error, IgnoredAny, SeqAccess, Visitor, value::SeqAccessDeserializer,
};

use super::openai::ContentPart;
use crate::text::stop::StopSet;

/// Most prompts of a request, and most answers that it may ask for.
pub(crate) const MAX_CHOICES: usize = 128;

/// Most stop strings of a request.
pub(crate) const MAX_STOPS: usize = 64;

/// Longest stop string in bytes.
pub(crate) const MAX_STOP_BYTES: usize = 1024;

/// Most stop tokens of a request.
pub(crate) const MAX_STOP_TOKEN_IDS: usize = 1024;

/// One prompt of a completion.
#[derive(Debug, PartialEq)]
pub(crate) enum PromptInput {
    Text(String),
    Tokens(Vec<u32>),
}

/// Text or token ids, one prompt or several.
#[derive(Debug, PartialEq)]
pub(crate) struct Prompts(pub(crate) Vec<PromptInput>);

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptsVisitor)
    }
}

struct PromptsVisitor;

impl<'de> Visitor<'de> for PromptsVisitor {
    type Value = Prompts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a list of texts, a list of token ids or a list of such lists")
    }

    fn visit_str<E>(self, text: &str) -> Result<Prompts, E> {
        Ok(Prompts(vec![PromptInput::Text(text.to_owned())]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompts, A::Error> {
        let (mut kind, mut ids, mut prompts) = (None, Vec::new(), Vec::new());
        while let Some(item) = list.next_element::<PromptItem>()? {
            let own = mem::discriminant(&item);
            if *kind.get_or_insert(own) != own {
                return Err(A::Error::custom("a list cannot mix texts, token ids and lists of token ids"));
            }
            let prompt = match item {
                PromptItem::Token(id) => {
                    ids.push(id);
                    continue;
                }
                PromptItem::Text(text) => PromptInput::Text(text),
                PromptItem::Tokens(ids) => PromptInput::Tokens(ids),
            };
            if prompts.len() == MAX_CHOICES {
                return Err(A::Error::custom(format!("it has more than {MAX_CHOICES} prompts")));
            }
            prompts.push(prompt);
        }
        if !ids.is_empty() {
            prompts.push(PromptInput::Tokens(ids));
        }
        Ok(Prompts(prompts))
    }
}

/// An entry of a list of prompts, or of the list that is one prompt.
enum PromptItem {
    Text(String),
    Token(u32),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for PromptItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptItemVisitor)
    }
}

struct PromptItemVisitor;

impl<'de> Visitor<'de> for PromptItemVisitor {
    type Value = PromptItem;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a token id or a list of token ids")
    }

    fn visit_str<E>(self, text: &str) -> Result<PromptItem, E> {
        Ok(PromptItem::Text(text.to_owned()))
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<PromptItem, E> {
        u32::try_from(id)
            .map(PromptItem::Token)
            .map_err(|_| E::invalid_value(serde::de::Unexpected::Unsigned(id), &"a token id"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<PromptItem, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(list)).map(PromptItem::Tokens)
    }
}

/// One stop string or a list of them.
#[derive(Debug)]
pub(crate) struct Stops(pub(crate) StopSet);

impl<'de> Deserialize<'de> for Stops {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StopsVisitor)
    }
}

struct StopsVisitor;

impl StopsVisitor {
    fn check_length<E: Error>(text: &str) -> Result<(), E> {
        if text.len() <= MAX_STOP_BYTES {
            return Ok(());
        }
        let problem = format!("a stop string has {} bytes, the most are {MAX_STOP_BYTES}", text.len());
        Err(E::custom(problem))
    }
}

impl<'de> Visitor<'de> for StopsVisitor {
    type Value = Stops;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or a list of texts")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Stops, E> {
        Self::check_length(text)?;
        Ok(Stops(StopSet::new([text.to_owned()])))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Stops, A::Error> {
        let mut stops = Vec::new();
        while let Some(text) = list.next_element::<String>()? {
            if stops.len() == MAX_STOPS {
                return Err(A::Error::custom(format!("it has more than {MAX_STOPS} stop strings")));
            }
            Self::check_length(&text)?;
            stops.push(text);
        }
        Ok(Stops(StopSet::new(stops)))
    }
}

/// Ids of stop tokens.
#[derive(Debug)]
pub(crate) struct StopTokenIds(pub(crate) Vec<u32>);

impl<'de> Deserialize<'de> for StopTokenIds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(StopTokenIdsVisitor)
    }
}

struct StopTokenIdsVisitor;

impl<'de> Visitor<'de> for StopTokenIdsVisitor {
    type Value = StopTokenIds;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of token ids")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<StopTokenIds, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = list.next_element()? {
            if ids.len() == MAX_STOP_TOKEN_IDS {
                return Err(A::Error::custom(format!("it has more than {MAX_STOP_TOKEN_IDS} token ids")));
            }
            ids.push(id);
        }
        Ok(StopTokenIds(ids))
    }
}

/// What a message of a chat says. Text parts are one text, on lines of their own.
#[derive(Debug)]
pub(crate) enum Content {
    Text(String),
    /// The index of a part that is no text, and what it is.
    NoText(usize, String),
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the content of a message as a text or a list of parts")
    }

    fn visit_str<E>(self, text: &str) -> Result<Content, E> {
        Ok(Content::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Content, A::Error> {
        let mut all = String::new();
        let mut index = 0;
        while let Some(part) = list.next_element::<ContentPart>()? {
            let problem = match (part.kind.as_deref(), part.text) {
                (Some("text") | None, Some(text)) => {
                    all.push_str(if index == 0 { "" } else { "\n" });
                    all.push_str(&text);
                    index += 1;
                    continue;
                }
                (Some("text") | None, None) => "has no text".to_owned(),
                (Some(other), _) => format!("is of type {other}, but this model reads text only"),
            };
            skip_rest(list)?;
            return Ok(Content::NoText(index, problem));
        }
        Ok(Content::Text(all))
    }
}

/// Reads on to the end of a list without building anything.
pub(crate) fn skip_rest<'de, A: SeqAccess<'de>>(mut list: A) -> Result<(), A::Error> {
    while list.next_element::<IgnoredAny>()?.is_some() {}
    Ok(())
}
