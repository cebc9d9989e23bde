draw() {
    arguments=$(word)
    expected="Hello, $arguments!"
}
