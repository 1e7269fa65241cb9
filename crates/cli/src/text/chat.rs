//! Chat templates: messages to the one string the model was trained on.
//!
//! Templates are Jinja as transformers runs it: blocks trimmed, Python's string and dict methods,
//! `raise_exception`, `strftime_now`, and a `tojson` that writes as Python's `json.dumps`.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow};
use minijinja::{Environment, Error, ErrorKind, Value, context, syntax::SyntaxConfig, value::Kwargs};

use super::json::to_python_json;

/// A compiled chat template with the special tokens it may name.
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: Value,
}

/// Special tokens by their template names.
#[derive(Debug, Clone, Default)]
pub(crate) struct SpecialTokens {
    /// Beginning of a sequence.
    pub(crate) bos_token: String,
    /// End of a sequence or turn.
    pub(crate) eos_token: String,
    /// Unknown text.
    pub(crate) unk_token: Option<String>,
    /// Padding.
    pub(crate) pad_token: Option<String>,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Compiles `source`.
    pub(crate) fn new(source: &str, special_tokens: &SpecialTokens) -> Result<Self> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(one_line)?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| strftime(unix_seconds(), &format));
        environment.add_filter("tojson", |value: Value, kwargs: Kwargs| {
            let indent: Option<usize> = kwargs.get("indent")?;
            let _: (Option<Value>, Option<Value>, Option<Value>) =
                (kwargs.get("ensure_ascii")?, kwargs.get("separators")?, kwargs.get("sort_keys")?);
            kwargs.assert_all_used()?;
            to_python_json(&value, indent)
                .map(Value::from_safe_string)
                .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
        });
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .map_err(one_line)
            .context("the model's chat template cannot be compiled")?;
        let SpecialTokens { bos_token, eos_token, unk_token, pad_token } = special_tokens;
        Ok(Self { environment, special_tokens: context! { bos_token, eos_token, unk_token, pad_token } })
    }

    /// The prompt for `messages`, up to where the assistant's answer begins.
    pub(crate) fn render(&self, messages: &[Value], tools: Option<&Value>) -> Result<String> {
        let template = self.environment.get_template(NAME).map_err(one_line)?;
        let values = context! {
            messages => messages,
            tools => tools,
            add_generation_prompt => true,
            ..self.special_tokens.clone()
        };
        template.render(values).map_err(one_line).context("the model's chat template refuses the messages")
    }
}

/// `{% generation %}` only marks training targets: the block's contents stay.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(len) = rest[open..].find("%}") else { break };
        let (before, tag) = (&rest[..open], &rest[open..open + len + 2]);
        out.push_str(before);
        let inner = tag[2..tag.len() - 2].trim_matches(['-', '+']).trim();
        match inner {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = &rest[open + len + 2..];
    }
    out.push_str(rest);
    out
}

fn one_line(error: Error) -> anyhow::Error {
    match error.detail() {
        Some(detail) => anyhow!("{} (line {})", detail, error.line().unwrap_or(0)),
        None => anyhow!("{} (line {})", error.kind(), error.line().unwrap_or(0)),
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// The codes of `strftime` that templates use, in UTC; other codes stay as they are.
fn strftime(unix: u64, format: &str) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let (days, second) = (unix / 86_400, unix % 86_400);
    let (year, month, day) = civil_date(days);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('H') => out.push_str(&format!("{:02}", second / 3600)),
            Some('M') => out.push_str(&format!("{:02}", second / 60 % 60)),
            Some('S') => out.push_str(&format!("{:02}", second % 60)),
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Year, month and day of a day counted from 1970-01-01. Years are counted from March, so that the
/// leap day is the last of its year.
fn civil_date(days: u64) -> (u64, u64, u64) {
    let day = days + 719_468;
    let (era, day_of_era) = (day / 146_097, day % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day_of_year - (153 * month_from_march + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> ChatTemplate {
        let special = SpecialTokens {
            bos_token: "<s>".to_owned(),
            eos_token: "</s>".to_owned(),
            ..SpecialTokens::default()
        };
        ChatTemplate::new(source, &special).unwrap()
    }

    fn message(role: &str, content: &str) -> Value {
        context! { role => role, content => content }
    }

    #[test]
    fn chat_ml_with_a_default_system_message() {
        let chat = template(
            "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
             {{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + \
             message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
             {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        );
        assert_eq!(
            chat.render(&[message("user", "<b>Hi & bye</b>")], None).unwrap(),
            "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\n<b>Hi & bye</b><|im_end|>\n\
             <|im_start|>assistant\n"
        );
    }

    #[test]
    fn blocks_are_trimmed_as_transformers_does() {
        let chat =
            template("{{ bos_token }}\n  {% for m in messages %}\n{{ m.content | trim }}\n  {% endfor %}\n");
        assert_eq!(
            chat.render(&[message("user", " a "), message("user", "b")], None).unwrap(),
            "<s>\na\nb\n"
        );
    }

    #[test]
    fn python_methods_and_loop_controls_work() {
        let chat = template(
            "{% for m in messages %}{% if m.content.startswith('#') %}{% continue %}{% endif %}\
             {{ m.get('role').upper() }}:{{ m['content'].split('|')[-1].strip() }};{% endfor %}",
        );
        let messages = [message("user", "#x"), message("user", "a| b ")];
        assert_eq!(chat.render(&messages, None).unwrap(), "USER:b;");
    }

    #[test]
    fn tools_are_written_as_python_writes_them() {
        let chat = template("{{ tools[0] | tojson }}\n{{ tools[0] | tojson(indent=4) }}");
        let tools: Value = serde_json::from_str(r#"[{"z": [1, "é<"], "a": {}, "n": null}]"#).unwrap();
        assert_eq!(
            chat.render(&[], Some(&tools)).unwrap(),
            "{\"z\": [1, \"é<\"], \"a\": {}, \"n\": null}\n\
             {\n    \"z\": [\n        1,\n        \"é<\"\n    ],\n    \"a\": {},\n    \"n\": null\n}"
        );
    }

    #[test]
    fn a_template_can_refuse_and_says_why() {
        let chat = template("{{ raise_exception('roles must alternate') }}");
        let error = format!("{:#}", chat.render(&[], None).unwrap_err());
        assert!(error.contains("roles must alternate"), "{error}");
    }

    #[test]
    fn a_broken_template_is_an_error_with_its_line() {
        let error = ChatTemplate::new("a\n{% if %}", &SpecialTokens::default()).err().unwrap();
        assert!(format!("{error:#}").contains("line 2"), "{error:#}");
    }

    #[test]
    fn generation_tags_leave_their_contents() {
        let chat = template("a{% generation %}b{%- endgeneration -%} c{% if true %}generation{% endif %}");
        assert_eq!(chat.render(&[], None).unwrap(), "abcgeneration");
    }

    /// Dates as `date -u -d @N` prints them.
    #[test]
    fn dates() {
        let format = "%d %b %Y %B %A %a %Y-%m-%d %H:%M:%S %% %q";
        assert_eq!(strftime(0, format), "01 Jan 1970 January Thursday Thu 1970-01-01 00:00:00 % %q");
        assert_eq!(strftime(951_827_696, "%Y-%m-%d %H:%M:%S %A"), "2000-02-29 12:34:56 Tuesday");
        assert_eq!(strftime(1_798_761_599, "%d %b %Y %A"), "31 Dec 2026 Thursday");
    }
}
