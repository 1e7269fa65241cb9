//! Requests from the wire, checked and turned into what the engine and the text side need.

use std::collections::BTreeMap;

use minijinja::Value as JinjaValue;
use turboquant_engine::sampler::SamplingParams;

use super::{
    error::ApiError,
    fields::Fields,
    openai::{ChatMessage, Content, OneOrMany, Prompt, StreamOptions},
};

/// Most answers that one request may ask for.
const MAX_CHOICES: usize = 128;

/// What both endpoints have in common.
#[derive(Debug)]
pub(crate) struct Options {
    /// Answers per prompt.
    pub(crate) n: usize,
    /// Of the first answer; the seeds of the others follow on.
    pub(crate) params: SamplingParams,
    /// Texts that end an answer.
    pub(crate) stops: Vec<String>,
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

/// One prompt of a completion.
#[derive(Debug)]
pub(crate) enum PromptInput {
    Text(String),
    Tokens(Vec<u32>),
}

/// `POST /v1/chat/completions`
#[derive(Debug)]
pub(crate) struct ChatRequest {
    pub(crate) options: Options,
    /// As chat templates read them.
    pub(crate) messages: Vec<JinjaValue>,
    pub(crate) tools: Option<JinjaValue>,
}

const UNSUPPORTED: [(&str, &str); 20] = [
    ("best_of", "ask for `n` answers and choose among them"),
    ("suffix", "only text after the prompt is generated"),
    ("functions", "use `tools`"),
    ("function_call", "use `tools`"),
    ("audio", "this server generates text only"),
    ("use_beam_search", "answers are sampled"),
    ("prompt_logprobs", "only generated tokens have log-probabilities"),
    ("guided_json", "answers are not constrained to a grammar"),
    ("guided_regex", "answers are not constrained to a grammar"),
    ("guided_choice", "answers are not constrained to a grammar"),
    ("guided_grammar", "answers are not constrained to a grammar"),
    ("allowed_token_ids", "use `logit_bias`"),
    ("bad_words", "use `logit_bias`"),
    ("include_stop_str_in_output", "answers end before a stop string"),
    ("length_penalty", "there is no beam search"),
    ("truncate_prompt_tokens", "prompts are taken whole or refused"),
    ("continue_final_message", "every answer is a new message"),
    ("chat_template", "the model's own is used"),
    ("documents", "put them into a message"),
    ("structured_outputs", "answers are not constrained to a grammar"),
];

impl CompletionRequest {
    pub(crate) fn parse(body: &[u8], served: &str) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        check_model(&mut fields, served)?;
        let prompts = match fields.take("prompt")? {
            None => return Err(ApiError::invalid_param("prompt", "The field `prompt` is missing.")),
            Some(Prompt::Text(text)) => vec![PromptInput::Text(text)],
            Some(Prompt::Texts(texts)) => texts.into_iter().map(PromptInput::Text).collect(),
            Some(Prompt::Tokens(ids)) => vec![PromptInput::Tokens(ids)],
            Some(Prompt::TokenLists(lists)) => lists.into_iter().map(PromptInput::Tokens).collect(),
        };
        if prompts.is_empty() {
            return Err(ApiError::invalid_param("prompt", "The field `prompt` is an empty list."));
        }
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
        let mut fields = Fields::parse(body)?;
        check_model(&mut fields, served)?;
        let messages: Vec<ChatMessage> = fields.take("messages")?.unwrap_or_default();
        if messages.is_empty() {
            return Err(ApiError::invalid_param(
                "messages",
                "The field `messages` needs at least one message.",
            ));
        }
        let messages = messages
            .into_iter()
            .enumerate()
            .map(|(i, m)| template_message(i, m))
            .collect::<Result<_, _>>()?;
        let tools: Option<Vec<JinjaValue>> = fields.take("tools")?;
        let tool_choice: Option<JinjaValue> = fields.take("tool_choice")?;
        let without_tools = tool_choice.as_ref().is_some_and(|choice| choice.as_str() == Some("none"));
        if tool_choice.is_some_and(|choice| !matches!(choice.as_str(), Some("none" | "auto"))) {
            let message =
                "The field `tool_choice` must be \"none\" or \"auto\": tool calls cannot be forced.";
            return Err(ApiError::unsupported("tool_choice", message));
        }
        let tools = tools.filter(|tools| !tools.is_empty() && !without_tools).map(JinjaValue::from);
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
fn check_model(fields: &mut Fields, served: &str) -> Result<(), ApiError> {
    match fields.take::<String>("model")? {
        Some(asked) if asked != served => Err(ApiError::no_such_model(&asked, served)),
        _ => Ok(()),
    }
}

impl Options {
    fn parse(fields: &mut Fields, max_tokens: Option<usize>, num_prompts: usize) -> Result<Self, ApiError> {
        fields.refuse(&UNSUPPORTED)?;
        if let Some(format) = fields.take::<BTreeMap<String, JinjaValue>>("response_format")?
            && format.get("type").is_none_or(|kind| kind.as_str() != Some("text"))
        {
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
        let stops: Option<OneOrMany<String>> = fields.take("stop")?;
        let defaults = SamplingParams::default();
        let logit_bias: BTreeMap<String, f32> = fields.take("logit_bias")?.unwrap_or_default();
        let logit_bias = logit_bias.into_iter().map(|(id, bias)| match id.parse() {
            Ok(id) => Ok((id, bias)),
            Err(_) => Err(ApiError::invalid_param(
                "logit_bias",
                format!("The keys of `logit_bias` are token ids, `{id}` is none."),
            )),
        });
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
            stop_token_ids: fields.take("stop_token_ids")?.unwrap_or_default(),
            ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
            logit_bias: logit_bias.collect::<Result<_, _>>()?,
            logprobs: None,
        };
        Ok(Self {
            n,
            params,
            stops: stops.map(OneOrMany::into_vec).unwrap_or_default(),
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
        Some(content) => {
            text_of(content).map_err(|(part, problem)| invalid(&format!(".content[{part}]"), &problem))?
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

/// Text parts become one text, on lines of their own. The error is a part's index and what is wrong.
fn text_of(content: Content) -> Result<String, (usize, String)> {
    let parts = match content {
        Content::Text(text) => return Ok(text),
        Content::Parts(parts) => parts,
    };
    let texts = parts.into_iter().enumerate().map(|(index, part)| match (part.kind.as_deref(), part.text) {
        (Some("text") | None, Some(text)) => Ok(text),
        (Some("text") | None, None) => Err((index, "has no text".to_owned())),
        (Some(other), _) => Err((index, format!("is of type {other}, but this model reads text only"))),
    });
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
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
