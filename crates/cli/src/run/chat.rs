//! `turboquant run` without a prompt: a conversation on the terminal.

use std::io::{self, BufRead, IsTerminal, Write};

use anyhow::Result;
use minijinja::{Value as JinjaValue, context};

use super::{CHAT_CONTEXT, sampling_params, start};
use crate::{
    args::RunArgs,
    console::{self, say},
    error::wrong_use,
    setup::Loaded,
    text::TextModel,
};

/// Room for an answer that the history must leave, if the context allows it.
const ANSWER_ROOM: usize = 512;

pub(crate) fn run(args: &RunArgs, loaded: &Loaded) -> Result<()> {
    if args.raw || !loaded.text.has_chat_template() {
        return Err(wrong_use(format!(
            "{} cannot chat {}; give a prompt to continue",
            loaded.name,
            if args.raw { "with --raw" } else { "because it has no chat template" }
        )));
    }
    let mut session = start(args, loaded, CHAT_CONTEXT)?;
    let max_model_len = session.plan.max_model_len;
    let mut params = sampling_params(&args.sampling);
    let room = params.max_tokens.unwrap_or(ANSWER_ROOM).min(max_model_len / 2);
    let mut history = History::new(args.system.as_deref());
    let interactive = io::stdin().is_terminal();
    if interactive {
        say(format_args!("{} (Ctrl-D or /exit ends, /clear forgets)", loaded.name));
    }
    let mut lines = io::stdin().lock().lines();
    let mut stdout = io::stdout();
    loop {
        if interactive {
            console::prompt("> ");
        }
        let Some(line) = lines.next() else { break };
        let line = line?;
        match line.trim() {
            "" => continue,
            "/exit" | "/quit" => break,
            "/clear" => {
                history = History::new(args.system.as_deref());
                continue;
            }
            _ => history.push("user", &line),
        }
        let prompt = match history.prompt(&loaded.text, max_model_len - room)? {
            Fit::Whole(ids) => ids,
            Fit::Shortened(ids, dropped) => {
                say(format_args!("note: the {dropped} oldest messages no longer fit and are forgotten"));
                ids
            }
            Fit::TooLong(tokens) => {
                say(format_args!(
                    "note: that has {tokens} tokens, more than the {max_model_len} of the context allow"
                ));
                history.messages.pop();
                continue;
            }
        };
        // An answer that reaches the end of the context ends; the conversation does not.
        let left = max_model_len - prompt.len();
        params.max_tokens = Some(args.sampling.max_tokens.map_or(left, |asked| asked.min(left)));
        let answer = session.generator.generate(prompt, params.clone(), |text| {
            stdout.write_all(text.as_bytes())?;
            stdout.flush()
        })?;
        writeln!(stdout)?;
        history.push("assistant", &answer);
    }
    if session.generator.speed().prompt_tokens > 0 {
        session.print_summary();
    }
    Ok(())
}

/// The conversation so far.
struct History {
    /// 1 if the first message is the system's, which is never forgotten.
    fixed: usize,
    messages: Vec<JinjaValue>,
}

/// A prompt and what it took to make it fit.
#[derive(Debug)]
enum Fit {
    Whole(Vec<u32>),
    /// So many of the oldest messages are gone.
    Shortened(Vec<u32>, usize),
    /// The last message alone has so many tokens.
    TooLong(usize),
}

impl History {
    fn new(system: Option<&str>) -> Self {
        let mut history = Self { fixed: usize::from(system.is_some()), messages: Vec::new() };
        if let Some(system) = system {
            history.push("system", system);
        }
        history
    }

    fn push(&mut self, role: &str, content: &str) {
        self.messages.push(context! { role, content });
    }

    /// Token ids of the conversation, at most `limit`; forgets the oldest question and answer until
    /// they fit.
    fn prompt(&mut self, text: &TextModel, limit: usize) -> Result<Fit> {
        let mut dropped = 0;
        loop {
            let rendered = text.render_chat(&self.messages, None);
            let rendered = rendered.ok_or_else(|| wrong_use("the model has no chat template"))??;
            let ids = text.encode_rendered(&rendered)?;
            if ids.len() <= limit {
                return Ok(if dropped == 0 { Fit::Whole(ids) } else { Fit::Shortened(ids, dropped) });
            }
            if self.messages.len() - self.fixed < 3 {
                return Ok(Fit::TooLong(ids.len()));
            }
            self.messages.drain(self.fixed..self.fixed + 2);
            dropped += 2;
        }
    }
}
