//! Sizes and counts as people read and write them.

use crate::report::grouped;

/// `2.05 MiB`; up to 1023 bytes exact.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.995 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.2} {}", UNITS[unit])
}

/// A rate in bytes per token: whole where it is.
pub(super) fn rate(bytes: f64) -> String {
    if bytes.fract() == 0.0 {
        grouped(bytes as u64)
    } else {
        format!("{}{}", grouped(bytes as u64), decimals(bytes.fract()))
    }
}

fn decimals(fraction: f64) -> String {
    format!("{fraction:.2}").trim_start_matches('0').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_with_separators_and_units() {
        assert_eq!(
            ["0", "999", "1,000", "2,146,304"],
            [0, 999, 1000, 2_146_304].map(grouped).each_ref().map(String::as_str)
        );
        assert_eq!(
            [size(1023), size(1024), size(2_146_304), size((1 << 30) - 1)],
            ["1023 B", "1.00 KiB", "2.05 MiB", "1.00 GiB"]
        );
        assert_eq!([rate(20480.0), rate(0.0), rate(6720.25)], ["20,480", "0", "6,720.25"]);
    }
}
