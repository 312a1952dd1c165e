# Removes orphans of another orchestrator on every client of a Nomad cluster, four times an hour. What leaked of hearth's
# own the daemon releases by itself: this job is not for it. docs/operations.md says more; a test holds it against the
# command line. The client must allow raw_exec: see hearth.nomad.hcl.

job "hearth-reclaim" {
  # Once on each client, each time.
  type        = "sysbatch"
  datacenters = ["*"]

  periodic {
    crons            = ["*/15 * * * *"]
    prohibit_overlap = true
  }

  group "reclaim" {
    # What was refused stays so until somebody looks; the next time comes anyway.
    restart {
      attempts = 0
      mode     = "fail"
    }

    # First what would go, and why, for the log. It changes nothing.
    task "plan" {
      driver = "raw_exec"
      lifecycle {
        hook = "prestart"
      }
      config {
        command = "/usr/local/bin/hearth"
        args    = ["reclaim", "plan", "--json", "--layout", "e2b"]
      }
      resources {
        cpu    = 200
        memory = 256
      }
    }

    # Without a question, and not more than so many each time. The rules are saved first, below /var/lib/hearth/backups.
    # The exit code is 1 if something was refused or did not go.
    task "apply" {
      # On the host's own mounts and namespaces, as the daemon.
      driver = "raw_exec"
      config {
        command = "/usr/local/bin/hearth"
        args    = ["reclaim", "apply", "--yes", "--max", "50", "--json", "--layout", "e2b"]
      }
      resources {
        cpu    = 200
        memory = 256
      }
    }
  }
}
