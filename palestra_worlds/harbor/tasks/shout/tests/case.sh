draw() {
    echo "$(word) $(word)" > /tmp/in
    expected=$(tr a-z A-Z < /tmp/in)
}
