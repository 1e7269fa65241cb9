//! The `turboquant` command.

mod answer;
mod args;
mod compare;
mod console;
mod error;
#[cfg(test)]
mod golden_tests;
mod health;
mod models;
mod plan;
mod report;
mod run;
mod serve;
mod setup;
mod text;

use std::{io::IsTerminal, process::ExitCode};

use clap::Parser;

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.command.set_threads();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .log_internal_errors(false)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env()
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn")),
        )
        .init();
    let result = match &cli.command {
        Command::Run(args) => run::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Plan(args) => plan::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if !error::is_broken_pipe(&error) {
                console::say(format_args!("error: {}", error::sentence(&error)));
            }
            ExitCode::from(error::exit_code(&error))
        }
    }
}
