draw() {
    one=$(number) two=$(number)
    arguments="$one $two"
    expected=$((one + two))
}
