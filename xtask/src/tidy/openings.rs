//! Openings of doc comments: an editor shows one comment at a time, so each must name its subject.
//!
//! The rule it keeps: a doc comment opens with a verb (functions) or a noun (the rest). Words that
//! cannot open such a sentence are findings. Whether the comment is true is left to its readers.

use super::{
    Finding, Source,
    comments::{self, Syntax},
};

/// Words that refer to what stands elsewhere, or begin a clause that stands for a noun.
const WITHOUT_A_SUBJECT: [&str; 58] = [
    "After", "And", "As", "At", "Because", "Before", "Both", "But", "By", "Do", "For", "From",
    "Has", "He", "Here", "How", "If", "In", "Is", "It", "Its", "Nobody", "Not", "Nothing", "Of",
    "On", "Only", "Or", "She", "Since", "So", "Such", "That", "Their", "Them", "Then", "There",
    "These", "They", "This", "Those", "To", "Until", "We", "Were", "What", "When", "Where",
    "Whether", "Which", "While", "Who", "Whoever", "Whom", "Whose", "Why", "With", "Without",
];

pub(super) fn check(file: &Source, findings: &mut Vec<Finding>) {
    let Some(Syntax::Rust) = Syntax::of(file) else {
        return;
    };
    let starts = comments::starts(Syntax::Rust, &file.text);
    let mut before = None;
    for (at, (line, start)) in file.text.lines().zip(starts).enumerate() {
        let said = start.and_then(|start| doc(&line[start..]));
        if let Some((kind, text)) = said
            && before != Some(kind)
            && let Some(word) = opening(text)
        {
            findings.push(file.finding(
                at + 1,
                format!("opens with `{word}`: name the subject, by a verb or a noun"),
            ));
        }
        before = said.map(|(kind, _)| kind);
    }
}

/// Returns the kind of a line of a doc comment, `///` or `//!`, and its text.
fn doc(comment: &str) -> Option<(&str, &str)> {
    let is_doc =
        comment.starts_with("//!") || comment.starts_with("///") && !comment.starts_with("////");
    is_doc.then(|| comment.split_at(3))
}

/// Returns the first word of `text` if no sentence with a subject opens with it.
fn opening(text: &str) -> Option<&str> {
    let text = text.trim_start();
    let end = text.find(|c: char| !c.is_alphabetic() && c != '-');
    let word = &text[..end.unwrap_or(text.len())];
    let is_same = text.starts_with("The same");
    (is_same || WITHOUT_A_SUBJECT.contains(&word)).then_some(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let file = Source {
            path: "a.rs".to_owned(),
            text: text.to_owned(),
        };
        let mut findings = Vec::new();
        check(&file, &mut findings);
        findings.iter().map(Finding::to_string).collect()
    }

    #[test]
    fn first_words_of_doc_comments_are_looked_at() {
        let text = "//! Pages.\n//! What follows is free.\n\n/// Whether it is.\nfn a() {}\n";
        let said = "a.rs:4: opens with `Whether`: name the subject, by a verb or a noun";
        assert_eq!(found(text), [said]);
        assert_eq!(found("/// The same as `b`.\nfn a() {}\n").len(), 1);
        assert_eq!(found("//! Pages.\n/// Of pages.\nfn a() {}\n").len(), 1);
    }

    #[test]
    fn plain_comments_strings_and_longer_words_are_free() {
        assert_eq!(found("// It is.\nlet a = \"/// It is.\";\n"), [""; 0]);
        assert_eq!(found("/// In-thread faults.\nfn a() {}\n"), [""; 0]);
        assert_eq!(
            found("/// Items.\n///\n/// It may fail.\nfn a() {}\n"),
            [""; 0]
        );
    }
}
