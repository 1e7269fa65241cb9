//! Progress bars of downloads; silent when stderr is no terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over `len` bytes.
pub(crate) fn bytes(len: u64, what: &str) -> ProgressBar {
    let bar = ProgressBar::new(len).with_message(what.to_owned());
    let style = ProgressStyle::with_template(
        "{msg} {wide_bar} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}",
    );
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
