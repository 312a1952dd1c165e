# Looks at every client of a Nomad cluster four times an hour. docs/operations.md says how to be told; a test holds it
# against the command line. The client must allow raw_exec: see hearth.nomad.hcl.

job "hearth-doctor" {
  # Once on each client, each time.
  type        = "sysbatch"
  datacenters = ["*"]

  periodic {
    crons            = ["*/15 * * * *"]
    prohibit_overlap = true
  }

  group "doctor" {
    # A finding does not go away by looking again: the allocation is failed, and says what was found.
    restart {
      attempts = 0
      mode     = "fail"
    }

    task "doctor" {
      # On the host's own mounts and namespaces, as the daemon.
      driver = "raw_exec"

      # It changes nothing. The exit code is 1 if there is a finding or something could not be seen.
      config {
        command = "/usr/local/bin/hearth"
        args    = ["doctor", "--json"]
      }

      resources {
        cpu    = 200
        memory = 256
      }
    }
  }
}
