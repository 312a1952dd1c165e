//! Layouts by name or file.

use std::path::Path;

use hearth_core::layout::{BUILT_IN, Layout};

/// The name under which this project's own instances are looked at.
pub(crate) const OWN: &str = "hearth";

/// The layout with this name, or in this file; nothing for our own.
///
/// # Errors
/// Says what is wrong with the file, or which names there are.
pub(crate) fn load(named: &str) -> Result<Option<Layout>, String> {
    if named == OWN {
        return Ok(None);
    }
    let built_in = BUILT_IN.iter().find(|(name, _)| *name == named);
    let text = match built_in {
        Some((_, text)) => (*text).to_owned(),
        None if named.contains('/') || Path::new(named).exists() => {
            std::fs::read_to_string(named).map_err(|e| format!("{named}: {e}"))?
        }
        None => {
            let names: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
            return Err(format!(
                "no layout is called {named:?}; there are {OWN}, {}, and files by their path",
                names.join(", ")
            ));
        }
    };
    let layout: Layout =
        toml::from_str(&text).map_err(|e| format!("{named}: {}", e.message().replace('\n', ", ")))?;
    layout.check().map_err(|why| format!("{named}: {why}"))?;
    Ok(Some(layout))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_in_can_be_used_and_a_fault_in_a_file_is_named() {
        for (name, text) in BUILT_IN {
            assert_eq!(load(name).unwrap().unwrap().name, name);
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), text.replace("first = 1", "first = 0")).unwrap();
            let why = load(file.path().to_str().unwrap()).unwrap_err();
            assert!(why.contains("count from 1"), "{why}");
        }
        assert!(load(OWN).unwrap().is_none());
        assert!(load("nothing").unwrap_err().contains("there are hearth, e2b"));
    }

    #[test]
    fn rules_of_both_generations_are_known() {
        let layout = load("e2b").unwrap().unwrap();
        for rule in [
            "PREROUTING -d 192.0.2.1/32 -i veth-7 -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 5016",
            "PREROUTING -i veth-7 -p tcp -m tcp --dport 443 -j REDIRECT --to-ports 5017",
            "PREROUTING -i veth-7 -p tcp -j REDIRECT --to-ports 5018",
        ] {
            assert_eq!(layout.slot_of_rule("nat", rule), Some(7), "{rule}");
        }
        let slot = |n: usize, text| layout.slot_of(&layout.elements[n].element, text);
        assert_eq!((slot(0, "veth-9"), slot(1, "10.11.0.9"), slot(1, "10.12.0.9")), (Some(9), Some(9), None));
    }
}
