//! Who a command runs as: `/etc/passwd` and `/etc/group` of the guest, parsed here since a static program
//! has no NSS and a guest may have no such files. The rules are those of `docker exec --user`.

use std::io::Read;

use hearth_core::agent::{AgentError, AgentErrorKind};

/// Larger files are cut: a guest's file must not grow the agent.
const MAX_FILE: u64 = 4 * 1024 * 1024;

/// The resolved user of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ids {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups.
    pub(crate) groups: Vec<u32>,
    /// Name, where the guest knows one.
    pub(crate) name: Option<String>,
    pub(crate) home: String,
}

/// Looks up `name`, `uid`, `name:group` or `uid:gid` in this system.
pub(crate) fn resolve(user: &str) -> Result<Ids, AgentError> {
    resolve_in(user, &read("/etc/passwd"), &read("/etc/group"))
}

/// A missing or unreadable file is an empty one: numbers work without it.
fn read(path: &str) -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = std::fs::File::open(path)
        && file.take(MAX_FILE).read_to_end(&mut bytes).is_err()
    {
        bytes.clear();
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

struct Account<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

fn accounts(passwd: &str) -> impl Iterator<Item = Account<'_>> {
    passwd.lines().filter_map(|line| {
        let mut f = line.split(':');
        let (name, _, uid, gid, _, home) = (f.next()?, f.next()?, f.next()?, f.next()?, f.next()?, f.next()?);
        Some(Account { name, uid: uid.parse().ok()?, gid: gid.parse().ok()?, home })
    })
}

/// Name, number and members of each group.
fn groups(group: &str) -> impl Iterator<Item = (&str, u32, &str)> {
    group.lines().filter_map(|line| {
        let mut f = line.split(':');
        let (name, _, gid) = (f.next()?, f.next()?, f.next()?);
        Some((name, gid.parse().ok()?, f.next().unwrap_or("")))
    })
}

fn resolve_in(user: &str, passwd: &str, group: &str) -> Result<Ids, AgentError> {
    let (who, group_of) = match user.split_once(':') {
        Some((who, g)) => (who, Some(g)),
        None => (user, None),
    };
    let who = if who.is_empty() { "0" } else { who };
    let number: Option<u32> = who.parse().ok();
    // A name that looks like a number is a number, unless an account is called so.
    let account =
        accounts(passwd).find(|a| a.name == who).or_else(|| accounts(passwd).find(|a| Some(a.uid) == number));
    let mut ids = match (&account, number) {
        (Some(a), _) => Ids {
            uid: a.uid,
            gid: a.gid,
            groups: Vec::new(),
            name: Some(a.name.to_owned()),
            home: if a.home.is_empty() { "/".to_owned() } else { a.home.to_owned() },
        },
        (None, Some(uid)) => {
            let (name, home) = if uid == 0 { (Some("root"), "/root") } else { (None, "/") };
            Ids { uid, gid: 0, groups: Vec::new(), name: name.map(str::to_owned), home: home.to_owned() }
        }
        (None, None) => return Err(not_found(format!("no user {who:?} in the guest's /etc/passwd"))),
    };
    match group_of.filter(|g| !g.is_empty()) {
        Some(wanted) => {
            ids.gid = groups(group)
                .find(|(name, ..)| *name == wanted)
                .map(|(_, gid, _)| gid)
                .or_else(|| wanted.parse().ok())
                .ok_or_else(|| not_found(format!("no group {wanted:?} in the guest's /etc/group")))?;
        }
        None => {
            if let Some(name) = &ids.name {
                let member = |members: &str| members.split(',').any(|m| m == name);
                ids.groups = groups(group).filter(|(.., m)| member(m)).map(|(_, gid, _)| gid).collect();
            }
        }
    }
    if !ids.groups.contains(&ids.gid) {
        ids.groups.push(ids.gid);
    }
    // NGROUPS_MAX of the kernel.
    ids.groups.truncate(65_536);
    Ok(ids)
}

fn not_found(message: String) -> AgentError {
    AgentError { kind: AgentErrorKind::NotFound, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/sh\nbroken\nweb:x:33:34::/srv:/bin/false\n77:x:5:5::/h:\n";
    const GROUP: &str = "root:x:0:\nweb:x:34:\nlogs:x:4:web,other\ntape:x:26:web\n";

    fn ids(user: &str) -> Ids {
        resolve_in(user, PASSWD, GROUP).unwrap()
    }

    #[test]
    fn names_numbers_and_groups() {
        let web = ids("web");
        assert_eq!((web.uid, web.gid, web.home.as_str()), (33, 34, "/srv"));
        assert_eq!(web.groups, [4, 26, 34]);
        assert_eq!(ids("33"), web);
        assert_eq!(ids(""), ids("root"));
        let given = ids("web:logs");
        assert_eq!((given.gid, given.groups), (4, vec![4]));
        let free = ids("1234:99");
        assert_eq!((free.uid, free.gid, free.name, free.home.as_str()), (1234, 99, None, "/"));
        assert_eq!(ids("77").uid, 5);
    }

    #[test]
    fn unknown_names_are_named() {
        assert!(resolve_in("nobody", PASSWD, GROUP).unwrap_err().message.contains("\"nobody\""));
        assert!(resolve_in("web:none", PASSWD, GROUP).unwrap_err().message.contains("\"none\""));
        assert!(resolve_in("-1", PASSWD, GROUP).is_err());
        assert_eq!(resolve_in("", "", "").unwrap().home, "/root");
    }
}
