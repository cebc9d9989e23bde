draw() {
    expected=0
    for line in 1 2 3 4 5 6 7 8; do
        if [ $(($(number) % 2)) = 0 ]; then
            echo "$(word) error $(word)" >> /tmp/in
            expected=$((expected + 1))
        else
            echo "$(word) fine $(word)" >> /tmp/in
        fi
    done
}
