"""E2B's code interpreter on a server of your own: only the import differs.

rstar-sandbox serve &
python examples/e2b_sandbox.py
"""

from sandbox.integrations.e2b import Sandbox  # from e2b_code_interpreter import Sandbox


def main():
    with Sandbox.create() as sandbox:
        sandbox.files.write("data/prices.csv", "name,price\npen,2\nbook,12\n")
        sandbox.run_code("import csv\nrows = list(csv.DictReader(open('data/prices.csv')))")
        execution = sandbox.run_code("print(len(rows), 'rows')\nsum(int(row['price']) for row in rows)")
        print(execution.logs.stdout, execution.text)

        failed = sandbox.run_code("rows[2]")
        print(failed.error.name, "-", failed.error.value)

        sandbox.run_code("with open('total.txt', 'w') as file:\n    file.write('14')")
        print([entry.name for entry in sandbox.files.list()], sandbox.files.read("total.txt"))


if __name__ == "__main__":
    main()
