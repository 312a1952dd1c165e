# hearth's node daemon on every client of a Nomad cluster. docs/operations.md says why it is as it is; a test
# holds it against the daemon's own flags, paths and bounds.
#
# The client must allow two things that are off or lower by default:
#
#   client { max_kill_timeout = "750s" }             # else kill_timeout below is cut to 30 s
#   plugin "raw_exec" { config { enabled = true } }

job "hearth" {
  # One on each client.
  type        = "system"
  datacenters = ["*"]

  # One node after the other. Sandboxes go on meanwhile; only the API of that node is away for a moment.
  update {
    max_parallel = 1
    stagger      = "30s"
  }

  group "node" {
    network {
      mode = "host"
      port "api" {
        # The daemon's default, on loopback. See HEARTH_LISTEN below to serve other hosts.
        static = 5008
      }
    }

    # Tried again for as long as it takes: a node is never given up.
    restart {
      attempts = 10
      interval = "5m"
      delay    = "5s"
      mode     = "delay"
    }

    service {
      name     = "hearth"
      provider = "nomad"
      port     = "api"
      # Where the checks go. Leave it out when HEARTH_LISTEN is set.
      address = "127.0.0.1"

      # Readiness. It is 503 while the node starts, and that must restart nothing: a restart begins the
      # start anew. So no check_restart here, and none on the service, from where checks would inherit it.
      check {
        name     = "ready"
        type     = "http"
        path     = "/health"
        interval = "5s"
        timeout  = "2s"
      }

      # Liveness. It answers from the moment the port is bound, whatever the node is busy with.
      check {
        name     = "live"
        type     = "http"
        path     = "/health/live"
        interval = "10s"
        timeout  = "5s"
        check_restart {
          limit = 3
          # Longer than the daemon may wait for a former one (--takeover-seconds).
          grace = "90s"
        }
      }
    }

    task "daemon" {
      # Root on the host's own file system and namespaces: `exec` would put the daemon into a chroot, where
      # namespaces bound in /run/netns are not seen by the host.
      #
      # When the task stops, Nomad kills what is in the task's cgroup. That is the daemon and its short-lived
      # helpers. Sandboxes are born in hearth/<instance>/<id> at the top of the hierarchy and go on.
      driver = "raw_exec"

      config {
        command = "/usr/local/bin/hearth"
        args    = ["serve", "--log-format", "json", "--takeover-seconds", "30"]
      }

      kill_signal = "SIGTERM"
      # Longer than shutdown.drain_seconds (600) plus the time the daemon needs to end.
      kill_timeout = "750s"

      env {
        # The file the settings are in, if not /etc/hearth/hearth.toml:
        # HEARTH_CONFIG = "/etc/hearth/fleet.toml"
        #
        # To serve other hosts; the daemon then insists on a token (see below):
        # HEARTH_LISTEN = "${NOMAD_ADDR_api}"
        HEARTH_SHUTDOWN_MODE = "detach"
      }

      # The token, from Nomad's variables or from Vault:
      #
      # template {
      #   data        = "HEARTH_TOKEN={{ with nomadVar \"nomad/jobs/hearth\" }}{{ .token }}{{ end }}"
      #   # data      = "HEARTH_TOKEN={{ with secret \"kv/data/hearth\" }}{{ .Data.data.token }}{{ end }}"
      #   destination = "${NOMAD_SECRETS_DIR}/hearth.env"
      #   env         = true
      #   # A new token needs a new daemon. Sandboxes go on.
      #   change_mode = "restart"
      # }

      # Of the daemon alone.
      resources {
        cpu    = 500
        memory = 512
      }
    }
  }
}
