//! Environment variables of farpage's programs and libraries: [`check_environment`].
//!
//! The rule it keeps: a variable of our prefix that no part of farpage reads is an error, not a
//! setting that silently does nothing. The meaning of values is left to the parts that read them.

use std::env;

const PREFIX: &str = "FARPAGE_";

/// Variables that a user sets. Each program ignores the variables of the other programs.
const SETTINGS: [&str; 39] = [
    "FARPAGE_BUDGET",
    "FARPAGE_CODEC",
    "FARPAGE_DEADLINE",
    "FARPAGE_EVICTORS",
    "FARPAGE_FAULT_MODE",
    "FARPAGE_FILLERS",
    "FARPAGE_HIGH_WATER",
    "FARPAGE_KEY_FILE",
    "FARPAGE_LAST_WORDS",
    "FARPAGE_LOG",
    "FARPAGE_LOW_WATER",
    "FARPAGE_MEMSERVER_CAPACITY",
    "FARPAGE_MEMSERVER_CAPACITY_PER_ADDRESS",
    "FARPAGE_MEMSERVER_CONFIG",
    "FARPAGE_MEMSERVER_CONNECTIONS_PER_ADDRESS",
    "FARPAGE_MEMSERVER_CONNECTIONS_PER_CLIENT",
    "FARPAGE_MEMSERVER_DRAIN_TIMEOUT",
    "FARPAGE_MEMSERVER_ENDPOINT",
    "FARPAGE_MEMSERVER_EXTENTS_PER_ADDRESS",
    "FARPAGE_MEMSERVER_GRACE",
    "FARPAGE_MEMSERVER_LEASE",
    "FARPAGE_MEMSERVER_LISTEN",
    "FARPAGE_MEMSERVER_LOG",
    "FARPAGE_MEMSERVER_MEMORY",
    "FARPAGE_MEMSERVER_OPERATOR_KEY",
    "FARPAGE_MEMSERVER_PERSIST",
    "FARPAGE_MEMSERVER_PERSIST_ASYNC",
    "FARPAGE_MEMSERVER_RECONNECT_GRACE",
    "FARPAGE_MEMSERVER_SHARE",
    "FARPAGE_MEMSERVER_SOCKET_ACCESS",
    "FARPAGE_MEMSERVER_SPILL",
    "FARPAGE_NO_DIRECT_IO",
    "FARPAGE_PAGE_SIZE",
    "FARPAGE_READ_AHEAD",
    "FARPAGE_REDUNDANCY",
    // CMake looks for the package here, by its own convention.
    "FARPAGE_ROOT",
    "FARPAGE_RUN_LENGTH",
    "FARPAGE_SERVER",
    "FARPAGE_USER_MODE_ONLY",
];

/// Variables of this repository's own tests.
const OF_TESTS: [&str; 12] = [
    "FARPAGE_BINARIES",
    "FARPAGE_FUZZ_PAGES",
    "FARPAGE_PARTS",
    "FARPAGE_PROGRAMS",
    "FARPAGE_PROGRESS",
    "FARPAGE_PYTHON",
    "FARPAGE_RENEW",
    "FARPAGE_REQUIRE_VM",
    "FARPAGE_SIM_SEEDS",
    "FARPAGE_TORTURE_OPS",
    "FARPAGE_TURNS",
    "FARPAGE_VM_MIRROR",
];

/// Prefixes of variables that no user sets: messages of `farpage run` to the library that it
/// preloads, and of a test to its own children.
const INTERNAL: [&str; 3] = ["FARPAGE_RUN_", "FARPAGE_TEST_", "FARPAGE_VM_TEST_"];

/// A variable of our prefix that no part of farpage reads.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} is no variable of farpage{}: rename it, or unset it", suggestion(.like))]
pub struct UnknownVariable {
    name: String,
    /// The variable that was probably meant.
    like: Option<&'static str>,
}

crate::debug_as_display!(UnknownVariable);

fn suggestion(like: &Option<&str>) -> String {
    like.map_or_else(String::new, |like| format!(" (did you mean {like}?)"))
}

/// Looks for variables of this process that begin with `FARPAGE_` and that nothing of farpage
/// reads, such as misspelt ones.
///
/// # Errors
/// [`UnknownVariable`], the first one in alphabetical order.
pub fn check_environment() -> Result<(), UnknownVariable> {
    let names = env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    match names.filter(|name| !is_known(name)).min() {
        None => Ok(()),
        Some(name) => Err(UnknownVariable {
            like: most_like(&name),
            name,
        }),
    }
}

/// True if some part of farpage reads the variable `name`, or if it is not of our prefix.
pub fn is_known(name: &str) -> bool {
    !name.starts_with(PREFIX)
        || SETTINGS.contains(&name)
        || OF_TESTS.contains(&name)
        || INTERNAL.iter().any(|prefix| name.starts_with(prefix))
}

/// Returns the setting nearest to `name`, if at most a third of what follows the prefix differs.
fn most_like(name: &str) -> Option<&'static str> {
    let distance = |setting: &&str| strsim::damerau_levenshtein(name, setting);
    let nearest = SETTINGS.into_iter().min_by_key(distance)?;
    (distance(&nearest) <= (name.len() - PREFIX.len()) / 3).then_some(nearest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(name: &str) -> String {
        let (name, like) = (name.to_owned(), most_like(name));
        UnknownVariable { name, like }.to_string()
    }

    #[test]
    fn misspelt_settings_are_unknown_and_the_setting_is_suggested() {
        for (wrong, right) in [
            ("FARPAGE_MEMSERVER_CAPACTY", "FARPAGE_MEMSERVER_CAPACITY"),
            ("FARPAGE_BUGDET", "FARPAGE_BUDGET"),
            ("FARPAGE_PAGESIZE", "FARPAGE_PAGE_SIZE"),
            ("FARPAGE_SERVERS", "FARPAGE_SERVER"),
        ] {
            assert!(!is_known(wrong) && is_known(right));
            let text = said(wrong);
            assert!(text.contains(&format!("did you mean {right}?")), "{text}");
        }
        let text = said("FARPAGE_COLOUR_OF_THE_SKY");
        assert!(
            text.contains("unset it") && !text.contains("mean"),
            "{text}"
        );
    }

    #[test]
    fn variables_of_others_and_of_tests_are_left_alone() {
        for name in ["PATH", "FARPAGE", "FARPAGE_TEST_SEED", "FARPAGE_RUN_BUDGET"] {
            assert!(is_known(name), "{name}");
        }
    }
}
