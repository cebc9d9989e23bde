draw() {
    one=$(number) two=$(number)
    if [ "$one" = "$two" ]; then two=$((one + 1)); fi
    arguments="$one $two"
    if [ "$one" -gt "$two" ]; then expected=$one; else expected=$two; fi
}
