//! Requests from the wire, checked and turned into what the engine and the text side need.

use std::{collections::BTreeMap, fmt};

use minijinja::Value as JinjaValue;
use serde::de::{Deserialize, Deserializer, SeqAccess, Visitor};
use serde_json::value::RawValue;
use turboquant_engine::sampler::SamplingParams;

use super::{
    error::ApiError,
    fields::{Fields, Unsupported},
    openai::{ChatMessage, ResponseFormat, StreamOptions},
    values::{self, Content, MAX_CHOICES, PromptInput, Prompts, StopTokenIds, Stops},
};
use crate::text::stop::StopSet;

/// What both endpoints have in common.
#[derive(Debug)]
pub(crate) struct Options {
    /// Answers per prompt.
    pub(crate) n: usize,
    /// Of the first answer; the seeds of the others follow on.
    pub(crate) params: SamplingParams,
    /// Texts that end an answer.
    pub(crate) stops: StopSet,
    pub(crate) stream: bool,
    /// An event with the usage at the end of a stream.
    pub(crate) include_usage: bool,
}

/// `POST /v1/completions`
#[derive(Debug)]
pub(crate) struct CompletionRequest {
    pub(crate) options: Options,
    pub(crate) prompts: Vec<PromptInput>,
    /// Whether the answer begins with the prompt.
    pub(crate) echo: bool,
}

/// `POST /v1/chat/completions`
#[derive(Debug)]
pub(crate) struct ChatRequest {
    pub(crate) options: Options,
    /// As chat templates read them.
    pub(crate) messages: Vec<JinjaValue>,
    pub(crate) tools: Option<JinjaValue>,
}

/// The fields that are read by either endpoint, beside those of [`UNSUPPORTED`].
const FIELDS: [&str; 27] = [
    "model",
    "prompt",
    "echo",
    "messages",
    "tools",
    "tool_choice",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "stream",
    "stream_options",
    "response_format",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "logprobs",
    "top_logprobs",
];

const NO_GRAMMAR: &str = "answers are not constrained to a grammar";

/// The README has the same table.
pub(super) const UNSUPPORTED: [Unsupported; 20] = [
    unsupported("best_of", &["1"], "ask for `n` answers and choose among them"),
    unsupported("suffix", &["\"\""], "only text after the prompt is generated"),
    unsupported("functions", &["[]"], "use `tools`"),
    unsupported("function_call", &["\"none\"", "\"auto\""], "use `tools`"),
    unsupported("audio", &[], "this server generates text only"),
    unsupported("use_beam_search", &["false"], "answers are sampled"),
    unsupported("prompt_logprobs", &[], "only generated tokens have log-probabilities"),
    unsupported("guided_json", &[], NO_GRAMMAR),
    unsupported("guided_regex", &[], NO_GRAMMAR),
    unsupported("guided_choice", &[], NO_GRAMMAR),
    unsupported("guided_grammar", &[], NO_GRAMMAR),
    unsupported("structured_outputs", &[], NO_GRAMMAR),
    unsupported("allowed_token_ids", &[], "use `logit_bias`"),
    unsupported("bad_words", &["[]"], "use `logit_bias`"),
    unsupported("include_stop_str_in_output", &["false"], "answers end before a stop string"),
    unsupported("length_penalty", &["1"], "there is no beam search"),
    unsupported("truncate_prompt_tokens", &[], "prompts are taken whole or refused"),
    unsupported("continue_final_message", &["false"], "every answer is a new message"),
    unsupported("chat_template", &[], "the model's own is used"),
    unsupported("documents", &["[]"], "put them into a message"),
];

const fn unsupported(
    name: &'static str,
    harmless: &'static [&'static str],
    reason: &'static str,
) -> Unsupported {
    Unsupported { name, harmless, reason }
}

/// Our own copy of the name of a field that is read.
fn known(name: &str) -> Option<&'static str> {
    FIELDS.into_iter().chain(UNSUPPORTED.iter().map(|field| field.name)).find(|known| *known == name)
}

impl CompletionRequest {
    pub(crate) fn parse(body: &[u8], served: &str) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body, known)?;
        check_model(&mut fields, served)?;
        let Some(Prompts(prompts)) = fields.take("prompt")? else {
            return Err(ApiError::invalid_param("prompt", "The field `prompt` is missing."));
        };
        if prompts.is_empty() {
            return Err(ApiError::invalid_param("prompt", "The field `prompt` is an empty list."));
        }
        check_tool_choice(&mut fields)?;
        let echo = fields.take("echo")?.unwrap_or(false);
        let logprobs = fields.take_count("logprobs", 0)?;
        if echo && logprobs.is_some() {
            let message = "`echo` together with `logprobs` is not supported: the prompt's tokens have none.";
            return Err(ApiError::unsupported("echo", message));
        }
        let max_tokens = fields.take_count("max_tokens", 1)?.unwrap_or(16);
        let mut options = Options::parse(&mut fields, Some(max_tokens), prompts.len())?;
        options.params.logprobs = logprobs;
        Ok(Self { options, prompts, echo })
    }
}

impl ChatRequest {
    pub(crate) fn parse(body: &[u8], served: &str) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body, known)?;
        check_model(&mut fields, served)?;
        let messages = fields.take("messages")?.map_or(Ok(Vec::new()), |Messages(messages)| messages)?;
        if messages.is_empty() {
            return Err(ApiError::invalid_param(
                "messages",
                "The field `messages` needs at least one message.",
            ));
        }
        let tools: Option<Vec<JinjaValue>> = fields.take("tools")?;
        let wanted = check_tool_choice(&mut fields)?;
        let tools = tools.filter(|tools| !tools.is_empty() && wanted).map(JinjaValue::from);
        let logprobs = fields.take("logprobs")?.unwrap_or(false);
        let top_logprobs = fields.take_count("top_logprobs", 0)?;
        if top_logprobs.is_some() && !logprobs {
            let message = "The field `top_logprobs` needs `logprobs` to be true.";
            return Err(ApiError::invalid_param("top_logprobs", message));
        }
        let newer = fields.take_count("max_completion_tokens", 1)?;
        let max_tokens = newer.or(fields.take_count("max_tokens", 1)?);
        let mut options = Options::parse(&mut fields, max_tokens, 1)?;
        options.params.logprobs = logprobs.then_some(top_logprobs.unwrap_or(0));
        Ok(Self { options, messages, tools })
    }
}

/// A missing name means the one model there is.
fn check_model(fields: &mut Fields<'_>, served: &str) -> Result<(), ApiError> {
    match fields.take::<String>("model")? {
        Some(asked) if asked != served => Err(ApiError::no_such_model(&asked, served)),
        _ => Ok(()),
    }
}

/// Whether tools are wanted.
fn check_tool_choice(fields: &mut Fields<'_>) -> Result<bool, ApiError> {
    match fields.take::<&RawValue>("tool_choice")?.map(RawValue::get) {
        None | Some("\"auto\"") => Ok(true),
        Some("\"none\"") => Ok(false),
        Some(_) => {
            let message =
                "The field `tool_choice` must be \"none\" or \"auto\": tool calls cannot be forced.";
            Err(ApiError::unsupported("tool_choice", message))
        }
    }
}

impl Options {
    fn parse(
        fields: &mut Fields<'_>,
        max_tokens: Option<usize>,
        num_prompts: usize,
    ) -> Result<Self, ApiError> {
        fields.refuse(&UNSUPPORTED)?;
        let format: Option<ResponseFormat> = fields.take("response_format")?;
        if format.is_some_and(|format| format.kind.as_deref() != Some("text")) {
            let message = "The field `response_format` must have the type \"text\": answers are not \
                           constrained to a grammar.";
            return Err(ApiError::unsupported("response_format", message));
        }
        let stream = fields.take("stream")?.unwrap_or(false);
        let stream_options: Option<StreamOptions> = fields.take("stream_options")?;
        if stream_options.is_some() && !stream {
            let message = "The field `stream_options` needs `stream` to be true.";
            return Err(ApiError::invalid_param("stream_options", message));
        }
        let n = fields.take_count("n", 1)?.unwrap_or(1);
        if n.saturating_mul(num_prompts) > MAX_CHOICES {
            let message = format!("The request asks for more than {MAX_CHOICES} answers at once.");
            return Err(ApiError::invalid_param("n", message));
        }
        let stops = fields.take("stop")?.map_or_else(StopSet::default, |Stops(stops)| stops);
        let stop_token_ids = fields.take("stop_token_ids")?.map_or_else(Vec::new, |StopTokenIds(ids)| ids);
        let defaults = SamplingParams::default();
        let logit_bias: BTreeMap<u32, f32> = fields.take("logit_bias")?.unwrap_or_default();
        let params = SamplingParams {
            max_tokens,
            min_tokens: fields.take_count("min_tokens", 0)?.unwrap_or(0),
            temperature: fields.take("temperature")?.unwrap_or(defaults.temperature),
            // vLLM's -1 is "all" as well.
            top_k: fields.take::<i64>("top_k")?.map_or(Ok(0), top_k)?,
            top_p: fields.take("top_p")?.unwrap_or(defaults.top_p),
            min_p: fields.take("min_p")?.unwrap_or(defaults.min_p),
            repetition_penalty: fields.take("repetition_penalty")?.unwrap_or(defaults.repetition_penalty),
            presence_penalty: fields.take("presence_penalty")?.unwrap_or(defaults.presence_penalty),
            frequency_penalty: fields.take("frequency_penalty")?.unwrap_or(defaults.frequency_penalty),
            seed: fields.take::<i64>("seed")?.map(i64::cast_unsigned),
            stop_token_ids: stop_token_ids.into(),
            ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
            logit_bias: logit_bias.into_iter().collect(),
            logprobs: None,
        };
        Ok(Self {
            n,
            params,
            stops,
            stream,
            include_usage: stream_options.and_then(|options| options.include_usage).unwrap_or(false),
        })
    }
}

fn top_k(k: i64) -> Result<usize, ApiError> {
    usize::try_from(if k == -1 { 0 } else { k }).map_err(|_| {
        ApiError::invalid_param("top_k", format!("The field `top_k` is {k}, must be at least -1."))
    })
}

/// The messages of a chat as templates expect them, or what is wrong with the first wrong one.
struct Messages(Result<Vec<JinjaValue>, ApiError>);

impl<'de> Deserialize<'de> for Messages {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(MessagesVisitor)
    }
}

struct MessagesVisitor;

impl<'de> Visitor<'de> for MessagesVisitor {
    type Value = Messages;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of messages")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Messages, A::Error> {
        let mut messages = Vec::new();
        while let Some(message) = list.next_element::<ChatMessage>()? {
            match template_message(messages.len(), message) {
                Ok(message) => messages.push(message),
                Err(error) => {
                    values::skip_rest(list)?;
                    return Ok(Messages(Err(error)));
                }
            }
        }
        Ok(Messages(Ok(messages)))
    }
}

/// A message as templates expect it: a role, text, and tool calls with their arguments parsed.
fn template_message(index: usize, message: ChatMessage) -> Result<JinjaValue, ApiError> {
    let invalid = |field: &str, problem: &str| {
        let param = format!("messages[{index}]{field}");
        let message = format!("`{param}` {problem}.");
        ApiError::invalid_param(param, message)
    };
    // "developer" is what newer clients call the system message; templates do not know it.
    let role = match message.role.as_deref() {
        None | Some("") => return Err(invalid(".role", "is missing")),
        Some("developer") => "system",
        Some(role) => role,
    };
    let tool_calls = message.tool_calls.filter(|calls| !calls.is_empty());
    let content = match message.content {
        Some(Content::Text(text)) => text,
        Some(Content::NoText(part, problem)) => {
            return Err(invalid(&format!(".content[{part}]"), &problem));
        }
        None if tool_calls.is_some() => String::new(),
        None if role == "assistant" => return Err(invalid("", "has neither content nor tool_calls")),
        None => return Err(invalid(".content", "is missing")),
    };
    let mut fields = vec![("role", JinjaValue::from(role)), ("content", JinjaValue::from(content))];
    fields.extend(message.name.map(|name| ("name", JinjaValue::from(name))));
    fields.extend(message.tool_call_id.map(|id| ("tool_call_id", JinjaValue::from(id))));
    if let Some(calls) = tool_calls {
        let calls: Vec<JinjaValue> = calls.iter().map(with_parsed_arguments).collect();
        fields.push(("tool_calls", JinjaValue::from(calls)));
    }
    Ok(JinjaValue::from_pairs(fields))
}

/// Clients send the arguments of a call as a string with JSON inside; templates want the object.
fn with_parsed_arguments(call: &JinjaValue) -> JinjaValue {
    replace(call, "function", |function| {
        replace(function, "arguments", |arguments| {
            arguments
                .as_str()
                .and_then(|text| serde_json::from_str::<JinjaValue>(text).ok())
                .filter(|parsed| parsed.kind() == minijinja::value::ValueKind::Map)
                .unwrap_or_else(|| arguments.clone())
        })
    })
}

/// `map` with `change` applied to the value at `key`; anything that is no map stays as it is.
fn replace(map: &JinjaValue, key: &str, change: impl Fn(&JinjaValue) -> JinjaValue) -> JinjaValue {
    if map.kind() != minijinja::value::ValueKind::Map {
        return map.clone();
    }
    let Ok(keys) = map.try_iter() else { return map.clone() };
    JinjaValue::from_pairs(keys.map(|name| {
        let value = map.get_item(&name).unwrap_or_default();
        let value = if name.as_str() == Some(key) { change(&value) } else { value };
        (name, value)
    }))
}
