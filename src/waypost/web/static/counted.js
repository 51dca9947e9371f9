// A write is made with what was counted: while a filter differs from that, the button of the write is disabled.
export function startCounting() {
  document.addEventListener("input", ({ target }) => {
    const form = target.closest("form[data-counted]");
    if (!form) return;
    const changed = [...form.querySelectorAll("[data-filter]")].some(differs);
    for (const button of form.querySelectorAll("button:not([name=step])")) {
      button.disabled = changed;
      button.title = changed ? "Count these first" : "";
    }
  });
}

function differs(field) {
  if (field.tagName === "SELECT") return !field.selectedOptions[0]?.defaultSelected;
  // Some kinds of fields write a value in another way than the page has it.
  const counted = document.createElement("input");
  counted.type = field.type;
  counted.value = field.defaultValue;
  return field.value !== counted.value;
}
