//! Names of values on the command line.

use clap::ValueEnum;

/// Returns the name of `value` on the command line.
pub fn name_of(value: &impl ValueEnum) -> String {
    let value = value.to_possible_value().expect("no variant is skipped");
    value.get_name().to_owned()
}
