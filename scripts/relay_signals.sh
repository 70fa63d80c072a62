# Sourced: `relay_signals COMMAND ARGUMENTS` runs the command and hands SIGTERM and SIGUSR1 on to it, which a shell that waits would keep.
#
# Returns the status of the command, once it has ended. asked_to_leave is yes where such a signal came, else no.
relay_signals() {
    local child status
    asked_to_leave=no
    "$@" <&0 &
    child=$!
    trap 'asked_to_leave=yes; kill -TERM "$child" 2>/dev/null' TERM
    trap 'asked_to_leave=yes; kill -USR1 "$child" 2>/dev/null' USR1
    trap : INT # the terminal tells the command by itself
    while true; do
        status=0
        wait "$child" || status=$?
        kill -0 "$child" 2>/dev/null || break # else it was a signal to this shell that ended the wait
    done
    trap - TERM USR1 INT
    return "$status"
}
