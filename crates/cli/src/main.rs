//! The `turboquant` command.
#![expect(dead_code, reason = "the commands that use these parts come next")]

mod error;
mod models;
mod text;

fn main() {}
